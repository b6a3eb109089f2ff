"""Peaks of one model under several cures, at two batches: what each holds in the moment of its peak."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.planner.stage_bytes.stage_memory import StageMemory
from utils.units import GB, Category, Evidence
from utils.views.style import LOOKS, course_style, print_evidence

LEAST_GB = 0.2  # what is less than that is too thin to see


def draw_peaks(panels: Mapping[str, Mapping[str, StageMemory]], *, title: str) -> Figure:
    """A panel for each batch, a bar for each cure: bytes by category, and the moment of the peak."""
    rows = list(next(iter(panels.values())))
    with course_style():
        figure = Figure(figsize=(11.0, 1.5 + 0.42 * len(rows)), layout="constrained")
        drawn: dict[Category, None] = {}
        most = max(peak.allocated_bytes for panel in panels.values() for peak in panel.values())
        for axes, (name, panel) in zip(
            figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True
        ):
            for row, peak in enumerate(panel.values()):
                left = 0.0
                for category, held in peak.bytes_by_category.items():
                    if held / GB < LEAST_GB:
                        continue
                    look = LOOKS[category]
                    drawn[category] = None
                    axes.barh(
                        row,
                        held / GB,
                        left=left,
                        color=look.color,
                        hatch=look.hatch,
                        edgecolor="white",
                        height=0.7,
                    )
                    left += held / GB
                told = f"{peak.allocated_bytes / GB:.1f}, {peak.phase}"
                axes.annotate(
                    told,
                    (left, row),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=10,
                )
            axes.set_xlim(0, most / GB * 1.45)
            axes.set_title(name, fontsize=11)
            axes.set_xlabel("GB at the peak")
            axes.set_yticks(range(len(rows)), rows)
            axes.grid(False, axis="y")
        figure.axes[0].invert_yaxis()
        handles = [
            Patch(facecolor=LOOKS[each].color, hatch=LOOKS[each].hatch, edgecolor="white")
            for each in drawn
        ]
        figure.legend(handles, [str(each) for each in drawn], loc="outside lower center", ncols=6)
        figure.suptitle(title)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure
