"""Which rank holds which stage, and over which borders between ranks a micro-batch travels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["draw_placements"]

STAGE, SENT, KEPT = "#92dadd", "#bd1f01", "#717581"


def draw_placements(placements: Mapping[str, Sequence[int]], micro_batches: int) -> Figure:
    """A panel a placement: stages on their ranks, and the way of a micro-batch's activations.

    A whole arrow is a message; a dotted line stays on its rank. Gradients take each way back.

    Args:
        placements: by name, the rank of each stage, first stage first.
        micro_batches: in a step.
    """
    with course_style():
        figure = Figure(figsize=(11, 2.9), layout="constrained")
        every = figure.subplots(1, len(placements), squeeze=False)[0]
        for axes, (name, ranks) in zip(every, placements.items(), strict=True):
            borders = sum(a != b for a, b in itertools.pairwise(ranks))
            _draw_panel(axes, ranks)
            axes.set_title(f"{name}\n{borders} borders x 2 x {micro_batches} = {2 * borders * micro_batches} messages",
                           fontsize=11)  # fmt: skip
        handles = [
            Line2D(
                [],
                [],
                color=SENT,
                marker=">",
                label="sent to another rank; its gradient comes back",
            ),
            Line2D([], [], color=KEPT, linestyle=":", label="stays on the rank"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _draw_panel(axes: Axes, ranks: Sequence[int]) -> None:
    count, levels = 1 + max(ranks), len(ranks) // (1 + max(ranks))
    places = [(rank, stage // count) for stage, rank in enumerate(ranks)]
    for stage, (rank, level) in enumerate(places):
        axes.text(rank, level, f"stage {stage}", ha="center", va="center", fontsize=9, zorder=3,
                  bbox={"boxstyle": "round,pad=0.35", "facecolor": STAGE, "linewidth": 0})  # fmt: skip
    for (rank, level), (target, below) in itertools.pairwise(places):
        is_sent = rank != target
        wraps = is_sent and level != below  # the ring closes from the last rank to the first
        ends = ((rank, level + 0.15), (target, below - 0.15)) if level != below else (
            (rank + 0.38 * (target - rank), level), (target - 0.38 * (target - rank), below))  # fmt: skip
        axes.annotate("", ends[1], ends[0], zorder=2, arrowprops={
            "arrowstyle": "->" if is_sent else "-", "color": SENT if is_sent else KEPT,
            "linestyle": "-" if is_sent else ":", "linewidth": 2.0 if wraps else 1.5})  # fmt: skip
    axes.set_xticks(range(count), [f"rank {rank}" for rank in range(count)], fontsize=10)
    axes.set_xlim(-0.6, count - 0.4)
    middle = (levels - 1) / 2
    axes.set_ylim(middle + 0.85, middle - 0.85)  # one level is as large as two
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", length=0)


check_public(globals())
