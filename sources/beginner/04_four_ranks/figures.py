"""The lesson's drawings: who sends what to whom, how far losses lie apart, one backward of DDP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from utils.units import Category, Evidence
from utils.views.lanes import Span, draw_lanes
from utils.views.style import LOOKS, course_style, print_evidence

from .sending import Backward

__all__ = ["draw_apart", "draw_backward", "draw_step"]

RANKS = 4
LONG, SHARE = 1.9, 0.475  # of a bar: a whole copy, and a quarter of it
STRIDE, FIRST = 2.35, 2.75  # of the ranks' columns
# From above: what a process holds, and whether a rank holds it whole.
HELD = (
    (Category.ACTIVATIONS, False),
    (Category.PARAMETERS, True),
    (Category.OPTIMIZER_STATE, True),
    (Category.GRADIENTS, True),
)
SMALLEST = 1e-16  # of the logarithmic part of an axis that has a 0
LINES = ("-", "--", ":", "-.")


def draw_step(images: int) -> Figure:
    """Who holds what, in one process and on four ranks; below, the way of one share in a ring.

    Args:
        images: of the whole batch.
    """
    with course_style():
        figure = Figure(figsize=(9, 6.0), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=(1.0, 0.95))
        _draw_holders(above, images)
        _draw_ring(below)
    return figure


def _draw_holders(axes: Axes, images: int) -> None:
    for row, (category, _) in enumerate(HELD):
        axes.text(-0.15, -row, f"{category}", ha="right", va="center", fontsize=10)
    _draw_holder(axes, 0, f"one process\n{images} images", is_rank=False)
    for rank in range(RANKS):
        left = FIRST + rank * STRIDE
        _draw_holder(axes, left, f"rank {rank}\n{images // RANKS} images", is_rank=True)
    axes.axvline((LONG + FIRST) / 2, color="black", lw=1, ls="--")
    axes.set(xlim=(-2.3, FIRST + RANKS * STRIDE), ylim=(-3.5, 1.5))
    axes.axis("off")
    axes.set_title(
        "Drawing: a bar's length is its part of one process's. Only activations are divided"
    )


def _draw_holder(axes: Axes, left: float, name: str, *, is_rank: bool) -> None:
    axes.text(left + LONG / 2, 0.95, name, ha="center", va="center", fontsize=10)
    for row, (category, is_whole) in enumerate(HELD):
        width = SHARE if is_rank and not is_whole else LONG
        look = LOOKS[category]
        axes.barh(-row, width, 0.62, left, color=look.color, hatch=look.hatch, edgecolor="white")
        axes.barh(-row, LONG, 0.62, left, fill=False, edgecolor="#888888", lw=0.6)


def _draw_ring(axes: Axes) -> None:
    """The first of four shares of the gradients, hop by hop: which ranks' parts its holder has added."""
    hops = 2 * (RANKS - 1)
    gradients = LOOKS[Category.GRADIENTS]
    for hop in range(hops + 1):
        rank, is_sum = hop % RANKS, hop >= RANKS - 1
        parts = "sum" if is_sum else "+".join(map(str, range(hop + 1)))
        color = gradients.color if is_sum else "#eeeeee"
        box = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "#444444"}
        axes.text(hop, -rank, parts, ha="center", va="center", fontsize=10, bbox=box)
        if hop < hops:
            _arrow(axes, (hop + 0.3, -rank), (hop + 0.72, -((hop + 1) % RANKS)))
    axes.axvline(RANKS - 1 + 0.5, color="black", lw=1, ls="--")
    axes.set_xticks(range(hops + 1), ["start", *(f"hop {hop}" for hop in range(1, hops + 1))])
    axes.set_yticks([-rank for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
    axes.set(xlim=(-0.5, hops + 0.5), ylim=(-RANKS + 0.4, 0.6))
    axes.grid(False, axis="x")
    axes.set_title(
        f"Drawing: one of {RANKS} shares in a ring; {RANKS - 1} hops add it up, {RANKS - 1} pass on the sum"
    )


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#444444")
    )


def draw_apart(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, title: str, device: str
) -> Figure:
    """The largest relative difference of two lists of losses so far, step by step.

    Args:
        curves: by name, the losses and those that they are compared with.
        title: of the figure.
        device: where they were computed.
    """
    with course_style():
        figure = Figure(figsize=(9, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for (name, (losses, reference)), style in zip(curves.items(), LINES, strict=False):
            apart = (abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
            largest = list(itertools.accumulate(apart, max))
            steps = range(1, len(largest) + 1)
            axes.plot(steps, largest, style, lw=2)
            axes.annotate(
                name,
                (len(largest), largest[-1]),
                (0, 4),
                textcoords="offset points",
                ha="right",
                va="bottom",
                fontsize=10,
            )
        axes.set_yscale("symlog", linthresh=SMALLEST)
        axes.set_ylim(-0.5 * SMALLEST, 10)
        axes.set_yticks([0, *(10.0**power for power in range(-16, 1, 4))])
        axes.set_xlabel("step")
        axes.set_ylabel("relative difference,\nlargest so far")
        axes.set_title(title)
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


def draw_backward(ranks: Sequence[Backward], *, title: str) -> Figure:
    """One backward in lanes: each rank's layers, then rank 0's all-reduces, one a bucket."""
    first = ranks[0]
    lanes = {f"rank {rank}": each.spans for rank, each in enumerate(ranks)}
    for number, (size, span) in enumerate(zip(first.bucket_bytes, first.reduces, strict=True), 1):
        lanes[f"bucket {number}, {size / 1024:.0f} KiB"] = [Span("all-reduce on rank 0", *span)]
    figure = draw_lanes(lanes, title=title, device="CPU, 1 thread a rank")
    axes = figure.axes[0]
    start = min(span.start_seconds for lane in lanes.values() for span in lane)
    end = 1e3 * (first.end_seconds - start)
    axes.axvline(end, color="black", lw=1, ls="--")
    lowest = len(lanes) - 1
    axes.text(end, lowest + 0.45, "rank 0's backward ends ", ha="right", va="top", fontsize=9)
    last = 1e3 * (first.reduces[-1][0] - start)
    axes.text(min(last, end), lowest, "not hidden: ", ha="right", va="center", fontweight="bold")
    axes.set_ylim(lowest + 0.85, -0.6)
    _move_legend_inside(figure, axes)
    return figure


def _move_legend_inside(figure: Figure, axes: Axes) -> None:
    """Below the ranks' lanes and left of later buckets nothing is drawn."""
    outside = figure.legends[0]
    names = [text.get_text() for text in outside.get_texts()]
    handles = [handle for handle in outside.legend_handles if handle is not None]
    outside.remove()
    axes.legend(handles, names, loc="lower left", fontsize=9, title="white: between operations")
