"""Which sizes of a step fit a budget: one grid per method, sequence length over micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.memory import Measurement
from utils.units import GB, parse_bytes
from utils.views.style import course_style, print_evidence

FITS, TOO_MUCH = "#c9e2f5", "#f3d2c8"

# (sequence length, micro-batch) -> measurement
Grid = Mapping[tuple[int, int], Measurement]


def draw_budget_map(grids: Mapping[str, Grid], limit: str, *, title: str = "") -> Figure:
    """Peaks in GB, one panel per method; what is over the limit is shaded and struck with a cross.

    Args:
        grids: name of a method -> its measurements by (sequence length, micro-batch); all of the
            same sizes.
        limit: the budget, such as "24GB".

    Raises:
        ValueError: no grids, or grids of different sizes.
    """
    sizes = [set(grid) for grid in grids.values()]
    if not sizes or not sizes[0] or any(other != sizes[0] for other in sizes):
        raise ValueError("draw_budget_map() needs grids of the same sequence lengths and batches.")
    with course_style():
        figure = Figure(figsize=(3.4 * len(grids) + 0.6, 4.0), layout="constrained")
        panels = figure.subplots(1, len(grids), squeeze=False)[0]
        for axes, (name, grid) in zip(panels, grids.items(), strict=True):
            _draw_panel(axes, name, grid, parse_bytes(limit))
        panels[0].set_ylabel("sequence length (tokens)")
        figure.suptitle(title or f"Peak in GB; a cross is over {limit}")
        every = [m for grid in grids.values() for m in grid.values()]
        print_evidence(figure, [m.evidence for m in every], [m.device for m in every])
    return figure


def _draw_panel(axes: Axes, name: str, grid: Grid, limit_bytes: int) -> None:
    lengths = sorted({length for length, _ in grid})
    batches = sorted({batch for _, batch in grid})
    for row, length in enumerate(lengths):
        for column, batch in enumerate(batches):
            peak_bytes = grid[length, batch].peak_bytes
            fits = peak_bytes <= limit_bytes
            box = (column - 0.5, row - 0.5)
            axes.add_patch(_cell(box, FITS if fits else TOO_MUCH))
            text = f"{peak_bytes / GB:.1f}" + ("" if fits else "\n\N{MULTIPLICATION SIGN}")
            axes.text(column, row, text, ha="center", va="center", fontsize=11)
    axes.set(xlim=(-0.5, len(batches) - 0.5), ylim=(-0.5, len(lengths) - 0.5))
    axes.set_xticks(np.arange(len(batches)), [str(batch) for batch in batches])
    axes.set_yticks(np.arange(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_xlabel("micro-batch (sequences)")
    axes.set_title(name, fontsize=12)
    axes.grid(False)


def _cell(corner: tuple[float, float], color: str) -> Rectangle:
    return Rectangle(corner, 1, 1, facecolor=color, edgecolor="white", linewidth=2)


__all__ = ["draw_budget_map"]

check_public(globals())
