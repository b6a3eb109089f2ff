"""`validate()`: every published table beside the planner, in one table."""

from __future__ import annotations

from collections.abc import Callable

from utils.validation import adapters, bloom, megatron, states, ultrascale
from utils.validation.comparison import Comparison, Summary, summarize

SOURCES: dict[str, Callable[[], list[Comparison]]] = {
    "korthikanti-memory": states.korthikanti_comparisons,
    "megatron": megatron.comparisons,
    "ultrascale-memory": ultrascale.memory_comparisons,
    "bloom-memory": bloom.memory_comparisons,
    "adapters": adapters.comparisons,
}


def compare_all(sources: tuple[str, ...] = tuple(SOURCES)) -> list[Comparison]:
    """Every published number with its prediction.

    Raises:
        KeyError: a source that is not in `SOURCES`.
    """
    return [row for name in sources for row in SOURCES[name]()]


def validate(sources: tuple[str, ...] = tuple(SOURCES)) -> list[Summary]:
    """Print predicted against published, source by source, and return the figures."""
    summaries = summarize(compare_all(sources))
    print(f"{'source':<30}{'quantity':<24}{'rows':>5}{'median':>8}{'mean':>7}{'p90':>7}"
          f"{'worst':>7}{'bias':>7}{'naive':>7}{'unfitted':>9}")  # fmt: skip
    for row in summaries:
        print(_line(row))
    wrong = [cell for cell in states.zero_cells() if cell.printed != cell.ours]
    print(f"ZeRO Table 1: {len(states.zero_cells()) - len(wrong)} of {len(states.zero_cells())} "
          "cells as printed")  # fmt: skip
    verdicts = bloom.fits()
    missed = [case for case, ran, fit in verdicts if ran != fit]
    print(f"BLOOM prequel: {len(verdicts) - len(missed)} of {len(verdicts)} fits and OOMs right")
    return summaries


def _line(row: Summary) -> str:
    figures = [row.median, row.mean, row.p90, row.worst, row.bias, row.baseline, row.unfitted]
    cells = ["-" if figure is None else f"{figure:.1%}" for figure in figures]
    widths = (8, 7, 7, 7, 7, 7, 9)
    numbers = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{row.source:<30}{row.quantity:<24}{row.rows:>5}{numbers}"
