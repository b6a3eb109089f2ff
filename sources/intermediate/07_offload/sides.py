"""A row for each form: what the card holds, and beside it what the host holds."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.units import GB, Category, Evidence
from utils.views.style import LOOKS, course_style, print_evidence, wrapped

__all__ = ["Held", "draw_sides"]

Held = Mapping[Category, float]
# Of the widest bar, in one panel and in two: narrower parts have no room for a number.
SMALLEST_NUMBER = (0.06, 0.09)
PLACES = ("on the card", "in host memory")


def draw_sides(
    rows: Mapping[str, tuple[Held, Held]],
    *,
    title: str,
    evidence: Evidence,
    device: str = "",
    unit_bytes: float = GB,
    unit: str = "GB",
    limit_bytes: float = 0,
    limit: str = "",
    places: tuple[str, str] = PLACES,
) -> Figure:
    """Bars of bytes by category, the card's on the left and the host's on the right, to one scale.

    Where no form has anything in host memory there is one panel, the card's.

    Args:
        rows: of each form, what the card holds and what the host holds.
        title: above the panels.
        evidence: what kind of numbers these are.
        device: where they are from.
        unit_bytes, unit: of the axes.
        limit_bytes, limit: the card's memory as a line with this name; 0 draws none.
        places: what the two panels are called.
    """
    most = max(sum(side.values()) for sides in rows.values() for side in sides) / unit_bytes
    with course_style():
        figure = Figure(figsize=(9.6, 2.3 + 0.62 * len(rows)), layout="constrained")
        sides = 2 if any(host for _, host in rows.values()) else 1
        panels = figure.subplots(1, sides, sharey=True, squeeze=False)[0]
        for side, axes in enumerate(panels):
            for row, held in enumerate(rows.values()):
                _draw_row(axes, row, held[side], unit_bytes, SMALLEST_NUMBER[sides - 1] * most)
            axes.set_xlim(0, 1.22 * most)
            axes.set_xlabel(f"{places[side]} ({unit})")
            axes.grid(False, axis="y")
        panels[0].set_yticks(range(len(rows)), [wrapped(name) for name in rows])
        panels[0].set_ylim(len(rows) - 0.4, -0.9 if limit_bytes else -0.6)
        if limit_bytes:
            panels[0].axvline(limit_bytes / unit_bytes, color="black", linestyle="--")
            panels[0].text(limit_bytes / unit_bytes, -0.62, f"  {limit}", va="center", fontsize=10)
        figure.suptitle(title, fontsize=13, fontweight="bold")
        figure.legend(handles=_handles(rows), loc="outside lower center", ncols=4)
        print_evidence(figure, [evidence], [device])
    return figure


def _draw_row(axes: Axes, row: int, held: Held, unit_bytes: float, smallest: float) -> None:
    left, shown = 0.0, [category for category in Category if held.get(category)]
    for category in shown:
        width = held[category] / unit_bytes
        look = LOOKS[category]
        axes.barh(row, width, left=left, height=0.6, color=look.color, hatch=look.hatch)
        if width > smallest:
            box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.85, "lw": 0}
            middle = left + width / 2
            axes.text(middle, row, f"{width:.1f}", ha="center", va="center", fontsize=9, bbox=box)
        left += width
    if len(shown) == 1 and left > smallest:
        return  # its number stands inside
    box = {"boxstyle": "square,pad=0", "facecolor": "white", "linewidth": 0}
    axes.text(left, row, f"  {left:.1f}", va="center", fontsize=10, zorder=3, bbox=box)


def _handles(rows: Mapping[str, tuple[Held, Held]]) -> list[Patch]:
    sides = [side for both in rows.values() for side in both]
    most = max(sum(side.values()) for side in sides)
    shown = [c for c in Category if any(side.get(c, 0) > 0.004 * most for side in sides)]
    return [Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, label=str(c)) for c in shown]
