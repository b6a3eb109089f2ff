"""The verdict as a picture: the MFU that each way out must reach, beside published and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["WayOut", "draw_ways_out"]

RANGE, NEED, DOT = "#d9d9d9", "#bd1f01", "#1a5c94"


class WayOut(NamedTuple):
    """One way out, as shares of the data sheet's FLOP/s.

    Attributes:
        needed: With which the run spends the whole budget, or ends at the deadline.
        predicted: What the planner says.
        published: The lowest and the highest of runs on the same GPU.
    """

    needed: float
    predicted: float
    published: tuple[float, float]


def draw_ways_out(rows: Mapping[str, WayOut]) -> Figure:
    """A row for each way out: it holds where the red line is left of the grey bar.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("draw_ways_out() needs rows: a WayOut by name.")
    with course_style():
        figure = Figure(figsize=(10.5, 1.9 + 0.45 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for height, row in enumerate(rows.values()):
            low, high = (100 * share for share in row.published)
            axes.barh(height, high - low, left=low, height=0.55, color=RANGE, zorder=1)
            axes.plot([100 * row.needed] * 2, [height - 0.35, height + 0.35], color=NEED, lw=3)
            axes.plot(100 * row.predicted, height, "o", ms=7, color=DOT, zorder=3)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=10)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 80)
        axes.set_xlabel("MFU, % of the data sheet's FLOP/s")
        axes.grid(False, axis="y")
        figure.suptitle("Needed at this price, published on this GPU, predicted for this plan", x=0.01,
                        ha="left", fontweight="bold")  # fmt: skip
        figure.legend(handles=_legend(), loc="outside lower center", ncols=3, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


def _legend() -> list[Patch | Line2D]:
    return [
        Line2D([], [], color=NEED, lw=3, label="MFU to reach"),
        Patch(color=RANGE, label="published, lowest to highest"),
        Line2D([], [], marker="o", ls="", ms=7, color=DOT, label="predicted"),
    ]
