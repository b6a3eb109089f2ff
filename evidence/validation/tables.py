"""The project's own copy of published measurements: one CSV a source, its origin in line one."""

from __future__ import annotations

import csv
from pathlib import Path

FOLDER = Path(__file__).with_name("published")


def table(name: str) -> list[dict[str, str]]:
    """All rows of a published table, as text: `table("zero_table1")`.

    Raises:
        ValueError: no such table; the sentence lists those there are.
    """
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.csv")))
        raise ValueError(f"No published table is called {name!r}. There are: {known}.")
    with open(path, newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def source(name: str) -> str:
    """Where a table was read: its first line.

    Raises:
        ValueError: no such table.
    """
    table(name)
    with open(FOLDER / f"{name}.csv", encoding="utf-8") as lines:
        return lines.readline().removeprefix("# source: ").strip()


def whole(text: str, default: int = 1) -> int:
    """A whole number from a cell that may be empty."""
    return int(float(text)) if text else default


def number(text: str) -> float | None:
    """A number from a cell, None where it holds none (empty, OOM)."""
    try:
        return float(text)
    except ValueError:
        return None
