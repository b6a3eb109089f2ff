"""Prints each measured speed beside its budget. Nothing here fails for being slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from utils.units import format_bytes, format_seconds

FORMATS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "bytes": format_bytes,
    "x": lambda ratio: f"{ratio:.2f}x",
}
ROWS = pytest.StashKey[list[tuple[str, str, str, str]]]()

Report = Callable[[str, float, float, str], None]


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """`report(what, measured, budget, unit)`: one row; units are "s", "bytes" and "x"."""

    def add(what: str, measured: float, budget: float, unit: str = "s") -> None:
        write = FORMATS[unit]
        row = (what, write(measured), f"<= {write(budget)}", f"{measured / budget:.2f}")
        request.config.stash.setdefault(ROWS, []).append(row)

    return add


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table at the end of the run."""
    rows = terminalreporter.config.stash.get(ROWS, [])
    if rows:
        table = [("what", "measured", "budget", "measured / budget"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        terminalreporter.section("speeds beside their budgets")
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            terminalreporter.write_line("  ".join(cells).rstrip())
