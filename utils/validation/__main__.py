"""`python -m utils.validation`: predicted and simulated beside published, and other tools."""

from __future__ import annotations

from utils.validation.peers import compare_peers
from utils.validation.report import validate
from utils.validation.simulation_report import report, simulated_against_published


def main() -> None:
    """Print the planner's table, other tools on its rows, and the simulator's table."""
    validate()
    print(f"\n{'memory of one GPU':<28}{'tool':<28}{'rows':>5}{'median':>8}{'bias':>8}")
    for row in compare_peers():
        print(f"{row.source:<28}{row.tool:<28}{row.rows:>5}{row.median:>8.1%}{row.bias:>8.1%}")
    print()
    print(report(simulated_against_published()))


if __name__ == "__main__":
    main()
