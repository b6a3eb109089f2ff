"""The lesson's drawings: who sends what to whom, how far losses lie apart, one backward of DDP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.units import Category, Evidence
from utils.views.lanes import Span, draw_lanes
from utils.views.style import LOOKS, course_style, print_evidence

from .sending import Backward

__all__ = ["draw_apart", "draw_backward", "draw_step"]

RANKS = 4
STRIDE, WIDTH = 1.25, 0.95  # of a rank's box
# The strips of a box, from above: what it is, and its height. Activations of a share come last.
STRIPS = ((Category.PARAMETERS, 0.4), (Category.OPTIMIZER_STATE, 0.4), (Category.GRADIENTS, 0.4))
LINES = ("-", "--", ":", "-.")
ZERO = 1e-17  # where a logarithm has no place for 0


def draw_step(images: int) -> Figure:
    """One step of data parallelism: the batch dealt out, four replicas, one all-reduce.

    Args:
        images: of the whole batch.
    """
    with course_style():
        figure = Figure(figsize=(9, 4.0), layout="constrained")
        axes = figure.add_subplot()
        _rectangle(axes, 0, 3.1, (RANKS - 1) * STRIDE + WIDTH, "#dddddd", "")
        middle = ((RANKS - 1) * STRIDE + WIDTH) / 2
        axes.text(middle, 3.28, f"one batch of {images} images", ha="center", va="center")
        for rank in range(RANKS):
            _draw_rank(axes, rank, images // RANKS)
        _draw_ring(axes)
        axes.text(
            middle, -0.78, "all-reduce: every rank gets the sum of all gradients", ha="center"
        )
        axes.set(xlim=(-1.75, RANKS * STRIDE), ylim=(-0.95, 3.6))
        axes.axis("off")
        axes.set_title("Data parallelism, one step: all is held whole, but the batch is divided")
    return figure


def _draw_rank(axes: Axes, rank: int, share: int) -> None:
    left = rank * STRIDE
    middle = left + WIDTH / 2
    _arrow(axes, (middle, 3.08), (middle, 2.72))
    axes.text(middle, 2.55, f"rank {rank}: {share} images", ha="center", va="center", fontsize=10)
    look = LOOKS[Category.ACTIVATIONS]
    _rectangle(axes, left, 2.0, WIDTH, look.color, look.hatch)
    top = 1.9
    for category, height in STRIPS:
        top -= height
        _rectangle(axes, left, top, WIDTH, LOOKS[category].color, LOOKS[category].hatch)
        top -= 0.1
    if rank == 0:
        labels = [(2.2, "activations\nof a share"), (1.7, "parameters"), (1.2, "optimizer state")]
        for height, text in [*labels, (0.7, "gradients")]:
            axes.text(-0.1, height, text, ha="right", va="center", fontsize=10)


def _draw_ring(axes: Axes) -> None:
    """Arrows below the gradients: from each rank to the next, and from the last to the first."""
    for rank in range(RANKS - 1):
        start, end = rank * STRIDE + WIDTH / 2, (rank + 1) * STRIDE + WIDTH / 2
        _arrow(axes, (start, 0.48), (end, 0.48), bend=0.28)
    _arrow(axes, ((RANKS - 1) * STRIDE + WIDTH / 2, 0.42), (WIDTH / 2, 0.42), bend=-0.22)


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0
) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=style, arrowstyle="-|>", mutation_scale=14, color="#444444"
        )
    )


def _rectangle(
    axes: Axes, left: float, bottom: float, width: float, color: str, hatch: str
) -> None:
    axes.add_patch(
        Rectangle(
            (left, bottom), width, 0.36, facecolor=color, hatch=hatch, edgecolor="white", lw=0.5
        )
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
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for (name, (losses, reference)), style in zip(curves.items(), LINES, strict=False):
            apart = (max(ZERO, abs(a - b) / abs(b)) for a, b in zip(losses, reference, strict=True))
            largest = list(itertools.accumulate(apart, max))
            axes.semilogy(range(1, len(largest) + 1), largest, style, lw=2, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel(f"largest so far (0 at {ZERO:.0e})")
        axes.set_title(title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
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
    axes.text(end, 0.5, "rank 0's backward ends ", ha="right", va="center", fontsize=9)
    return figure
