"""The lesson's drawings: who holds what, who sends what to whom, when buckets travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from utils.units import Category
from utils.views.lanes import Span, draw_lanes
from utils.views.style import LOOKS, course_style

from .sending import Backward

__all__ = ["draw_holders", "draw_overlap", "draw_ring"]

RANKS = 4
LONG, SHARE = 1.9, 0.475  # of a bar: a whole copy, and a quarter of it
REST = 1.65  # most of it does not depend on the batch
STRIDE, FIRST = 2.35, 2.75  # of the ranks' columns
# From above: what is held, how long its bar is in one process and on a rank, and its name.
HELD = (
    (Category.ACTIVATIONS, LONG, SHARE, "activations"),
    (Category.PARAMETERS, LONG, LONG, "parameters"),
    (Category.OPTIMIZER_STATE, LONG, LONG, "optimizer state"),
    (Category.GRADIENTS, LONG, LONG, "gradients"),
    (Category.COMMUNICATION, 0.0, LONG, "DDP's buckets\n(section 3)"),
    (Category.TEMPORARIES, LONG, REST, "rest, such as a\nkernel's scratch"),
)
SHARES = "ABCD"  # of the gradients, one of which each rank sends first


def draw_holders(images: int) -> Figure:
    """Who holds what, in one process and on four ranks.

    Args:
        images: of the whole batch.
    """
    with course_style():
        figure = Figure(figsize=(9, 3.9), layout="constrained")
        _draw_holders(figure.add_subplot(), images)
    return figure


def draw_ring() -> Figure:
    """All four shares of an all-reduce on their way in a ring."""
    with course_style():
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        _draw_ring(figure.add_subplot())
    return figure


def _draw_holders(axes: Axes, images: int) -> None:
    for row, (*_, name) in enumerate(HELD):
        axes.text(-0.15, -row, name, ha="right", va="center", fontsize=10)
    _draw_holder(axes, 0, f"one process\n{images} images", is_rank=False)
    for rank in range(RANKS):
        left = FIRST + rank * STRIDE
        _draw_holder(axes, left, f"rank {rank}\n{images // RANKS} images", is_rank=True)
    axes.axvline((LONG + FIRST) / 2, color="black", lw=1, ls="--")
    axes.set(xlim=(-2.3, FIRST + RANKS * STRIDE), ylim=(0.5 - len(HELD), 1.5))
    axes.axis("off")
    axes.set_title(
        "Drawing: what a step holds at one time or another, each row to a scale of its own"
    )


def _draw_holder(axes: Axes, left: float, name: str, *, is_rank: bool) -> None:
    axes.text(left + LONG / 2, 0.95, name, ha="center", va="center", fontsize=10)
    for row, (category, alone, on_rank, _) in enumerate(HELD):
        look = LOOKS[category]
        width = on_rank if is_rank else alone
        axes.barh(-row, width, 0.62, left, color=look.color, hatch=look.hatch, edgecolor="white")
        axes.barh(-row, LONG, 0.62, left, fill=False, edgecolor="#888888", lw=0.6)


def _draw_ring(axes: Axes) -> None:
    """Which share each rank holds last after each hop, and which ranks' parts of it are added up."""
    hops = 2 * (RANKS - 1)
    for hop in range(hops + 1):
        for rank in range(RANKS):
            _draw_share(axes, hop, rank)
        if hop < hops:  # the first share's way; all others go the same way at the same time
            _follow(axes, hop, hop % RANKS)
    axes.axvline(RANKS - 1 + 0.5, color="black", lw=1, ls="--")
    axes.set_xticks(range(hops + 1), ["start", *(f"hop {hop}" for hop in range(1, hops + 1))])
    axes.set_yticks([-rank for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
    middle = (RANKS - 1) / 2
    for x, part in (
        (middle, "shares are summed (reduce-scatter)"),
        (middle + RANKS - 0.5, "sums go round (all-gather)"),
    ):
        axes.text(x, 0.95, part, ha="center", va="center", fontsize=10)
    axes.set(xlim=(-0.5, hops + 0.5), ylim=(-RANKS + 0.35, 1.2))
    axes.grid(False)
    axes.set_title(
        f"Drawing: a ring. In each hop every rank sends one of {RANKS} shares to the next rank"
    )


def _draw_share(axes: Axes, hop: int, rank: int) -> None:
    first = (rank - hop) % RANKS  # the rank that this share started from
    is_sum = hop >= RANKS - 1
    added = "+".join(str((first + step) % RANKS) for step in range(min(hop + 1, RANKS)))
    color = LOOKS[Category.GRADIENTS].color if is_sum else "#eeeeee"
    box = {"boxstyle": "round,pad=0.3", "facecolor": color, "edgecolor": "#888888"}
    if first == 0:  # the share to follow: a thick black frame
        box |= {"edgecolor": "black", "linewidth": 2}
    text = f"{SHARES[first]}: {'sum' if is_sum else added}"
    axes.text(hop, -rank, text, ha="center", va="center", fontsize=9, bbox=box)


def _follow(axes: Axes, hop: int, rank: int) -> None:
    """An arrow to the next rank; from the last one out below, and in above at the first."""
    if rank < RANKS - 1:
        _arrow(axes, (hop + 0.22, -rank - 0.24), (hop + 0.74, -rank - 0.76))
        return
    _arrow(axes, (hop + 0.22, -rank - 0.24), (hop + 0.45, -rank - 0.6))
    _arrow(axes, (hop + 0.55, 0.6), (hop + 0.78, 0.24))


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#444444")
    )


def draw_overlap(ways: Mapping[str, Backward], *, title: str, device: str) -> Figure:
    """Backward of layers that sleep, and below it a lane for each way: when its buckets were sent.

    Args:
        ways: by name, the first one's layers stand for all.
        title: of the figure.
        device: where they were timed.
    """
    layers = next(iter(ways.values())).layers
    ends = layers[-1][1]
    lanes = {"backward": [Span("backward", *pair) for pair in layers]}
    lanes |= {name: _hidden_or_not(way.sent, way.layers[-1][1]) for name, way in ways.items()}
    figure = draw_lanes(lanes, title=title, device=device)
    axes = figure.axes[0]
    for row, way in enumerate(ways.values(), start=1):
        for number, (start, end) in enumerate(way.sent, start=1):
            said = str(number) if len(way.sent) > 1 else f"1 to {len(layers)}"
            x = 1e3 * (start + end) / 2
            axes.text(x, row - 0.43, said, ha="center", va="center", fontsize=9)
    axes.axvline(1e3 * ends, color="black", lw=1, ls="--")
    axes.set_ylim(len(lanes) - 0.45, -0.5)
    axes.set_xlabel("time since backward began (ms)")
    _move_legend_below(figure)
    return figure


def _hidden_or_not(spans: Sequence[tuple[float, float]], end: float) -> list[Span]:
    """Parts of all-reduces before and after backward's end."""
    before = [Span("sent beside backward", a, min(b, end)) for a, b in spans if a < end]
    after = [Span("sent after backward: it shows", max(a, end), b) for a, b in spans if b > end]
    return before + after


def _move_legend_below(figure: Figure) -> None:
    outside = figure.legends[0]
    names = [text.get_text() for text in outside.get_texts()]
    handles = [handle for handle in outside.legend_handles if handle is not None]
    outside.remove()
    figure.legend(handles, names, loc="outside lower left", ncol=len(names), fontsize=9)
