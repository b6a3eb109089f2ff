"""Two hosts and the cable between them: which ranks talk, and what crosses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

from .wire import Message

INSIDE, CROSSING = "#717581", "#c85200"
APART = 2.6  # between the hosts' ranks
MOST_WAYS = 4


def draw_hosts(
    ways: Mapping[str, Sequence[Message]],
    nbytes: int,
    *,
    title: str,
    seconds: Mapping[str, float] | None = None,
) -> Figure:
    """A panel a way: arrows from who sends to who receives, and the bytes from host 0 to host 1.

    Args:
        ways: the messages of an all-reduce on two hosts of as many ranks, by name.
        nbytes: of the tensor, in which the crossing bytes are counted.
        title: of the figure.
        seconds: that each way took, where that was measured.

    Raises:
        ValueError: no ways, or more than there is room for.
    """
    if not 1 <= len(ways) <= MOST_WAYS:
        raise ValueError(f"draw_hosts() draws 1 to {MOST_WAYS} ways; these are {len(ways)}.")
    with course_style():
        figure = Figure(figsize=(3.1 * len(ways) + 0.2, 4.4), layout="constrained")
        panels = figure.subplots(1, len(ways), squeeze=False)[0]
        for axes, (name, messages) in zip(panels, ways.items(), strict=True):
            took = f"\n{1e3 * seconds[name]:,.0f} ms" if seconds else ""
            _draw_way(axes, messages, nbytes, took)
            axes.set_title(name, fontsize=11, loc="center")
        figure.suptitle(f"{title}\nthick: over the cable", x=0.01, ha="left", fontsize=12)
        print_evidence(figure, [Evidence.MEASURED], ["real ranks"])
    return figure


def _draw_way(axes: Axes, messages: Sequence[Message], nbytes: int, took: str) -> None:
    per_host = (1 + max(max(m.source, m.target) for m in messages)) // 2
    for host in (0, 1):
        corner = (APART * host - 0.55, -per_host + 0.35)
        axes.add_patch(Rectangle(corner, 1.1, per_host + 0.3, fill=False, edgecolor="black"))
        axes.text(APART * host, 0.85, f"host {host}", ha="center", fontsize=10)
    pairs = {(m.source, m.target) for m in messages}
    for source, target in sorted(pairs):
        _draw_arrow(axes, source, target, per_host, both=(target, source) in pairs)
    for rank in range(2 * per_host):
        place = _place(rank, per_host)
        axes.add_patch(Circle(place, 0.24, facecolor="white", edgecolor="black", zorder=3))
        axes.text(*place, str(rank), ha="center", va="center", fontsize=10, zorder=4)
    crossing = sum(m.bytes for m in messages if m.source < per_host <= m.target)
    steps = max(m.step for m in messages)
    axes.text(
        APART / 2,
        -per_host + 0.1,
        f"host 0 to 1: {crossing / nbytes:.2f} x the tensor\n{steps} steps{took}",
        ha="center",
        va="top",
        fontsize=10,
    )
    axes.set_xlim(-0.75, APART + 0.75)
    axes.set_ylim(-per_host - 1.2, 1.15)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _place(rank: int, per_host: int) -> tuple[float, float]:
    host, row = divmod(rank, per_host)
    return APART * host, float(-row)


def _draw_arrow(axes: Axes, source: int, target: int, per_host: int, both: bool) -> None:
    crosses = source // per_host != target // per_host
    far = not crosses and abs(source - target) > 1
    bend = 0.45 if far else 0.15 if both else 0.0
    arrow = FancyArrowPatch(
        _place(source, per_host),
        _place(target, per_host),
        connectionstyle=f"arc3,rad={bend}",
        arrowstyle="-|>",
        mutation_scale=12,
        shrinkA=10,
        shrinkB=10,
        color=CROSSING if crosses else INSIDE,
        lw=2.4 if crosses else 1.1,
        zorder=2,
    )
    axes.add_patch(arrow)


__all__ = ["draw_hosts"]

check_public(globals())
