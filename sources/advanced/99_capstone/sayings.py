"""How far off sayings are: what is said over what is measured, on a logarithmic line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from utils.units import Category, Evidence
from utils.views.style import LOOKS, course_style, empty_figure, print_evidence


class Saying(NamedTuple):
    """A number that circulates beside the right one, in the same unit."""

    name: str
    said: float
    right: float
    unit: str
    evidence: Evidence

    @property
    def factor(self) -> float:
        """How many times too large; below 1 where too small."""
        return self.said / self.right


def draw_sayings(sayings: Sequence[Saying], *, title: str = "Said over right") -> Figure:
    """One line a saying, from 1 to how many times too large or too small it is, largest on top.

    Args:
        sayings: One or more, each above zero.
        title: Of the figure.

    Raises:
        ValueError: none, or a number that no ratio can be made of.
    """
    if not sayings or any(not (row.said > 0 and row.right > 0) for row in sayings):
        raise ValueError("Sayings need numbers above zero: what is said, and what is right.")
    rows = sorted(sayings, key=lambda row: row.factor)
    with course_style():
        figure, axes = empty_figure(10.0, 0.9 + 0.42 * len(rows))
        for place, row in enumerate(rows):
            large = row.factor > 1
            color = LOOKS[Category.ACTIVATIONS if large else Category.PARAMETERS].color
            axes.plot([1, row.factor], [place, place], color=color, lw=2, zorder=1)
            axes.scatter(
                [row.factor], [place], color=color, marker="o" if large else "s", s=60, zorder=2
            )
            told = f"said {_short(row.said)}, right {_short(row.right)} {row.unit} ({row.evidence})"
            axes.annotate(
                told,
                (max(row.factor, 1), place),
                (10, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
            )
        axes.axvline(1, color="black", lw=1)
        axes.set_xscale("log")
        least, most = min(1, rows[0].factor), max(1, rows[-1].factor)
        axes.set_xlim(least / 1.6, most * 250)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_xlabel("said / right (circles: too large, squares: too small)")
        axes.set_title(title)
        print_evidence(figure, [row.evidence for row in rows])
    return figure


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
