"""`python -m utils.validation` prints predicted and simulated against published figures."""

from __future__ import annotations

from utils.validation.simulation_report import report, simulated_against_published

if __name__ == "__main__":
    print(report(simulated_against_published()))
