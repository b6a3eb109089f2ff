"""How long a learner waits before the course is open, once it is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from tests.browser.course import jupyter_lab

from .conftest import Report

ROOT = Path(__file__).resolve().parents[2]
READY_BUDGET_SECONDS = 5
NOTHING_TO_DO_BUDGET_SECONDS = 0.2


def test_second_set_up(benchmark: BenchmarkFixture, report: Report) -> None:
    """`make setup` when there is nothing to do."""
    options = {"cwd": ROOT, "check": True, "stdout": subprocess.DEVNULL}
    benchmark.pedantic(subprocess.run, (["make", "setup"],), options, rounds=5, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    report("second make setup", seconds, NOTHING_TO_DO_BUDGET_SECONDS, "s")


def test_jupyter_answers(benchmark: BenchmarkFixture, report: Report, tmp_path: Path) -> None:
    """From the start of JupyterLab to its first answer."""

    def start_and_stop(folder: Path) -> None:
        with jupyter_lab(ROOT, folder):
            pass

    folders = iter(tmp_path / str(number) for number in range(3))
    benchmark.pedantic(start_and_stop, setup=lambda: ((next(folders),), {}), rounds=3)
    report("JupyterLab starts and ends", benchmark.stats.stats.median, READY_BUDGET_SECONDS, "s")
