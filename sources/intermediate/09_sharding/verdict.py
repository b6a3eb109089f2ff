"""Who sends what across a node's border, in how many rounds; and which scheme keeps its speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.checked import check_public
from utils.traffic.collectives import Traffic
from utils.units import Category, Evidence
from utils.views.style import LOOKS, course_style, print_evidence

from .ways import ring_rounds

_KINDS = {
    "gather parameters, bf16": ("#92dadd", "//"),
    "reduce gradients, bf16": (LOOKS[Category.GRADIENTS].color, ""),
    "reduce gradients, fp32": (LOOKS[Category.GRADIENTS].color, "xx"),
}
_FAR = 2.6  # from one node to the next


def draw_rounds(
    sent: Mapping[str, Mapping[str, Iterable[Traffic]]],
    ranks: int,
    count: int,
    *,
    title: str,
) -> Figure:
    """A panel for each case, a bar for each way: rounds that a rank sends in a step, by kind.

    Args:
        sent: by case and way, the calls of one rank.
        ranks: of the ring.
        count: of the parameters.
        title: of both.

    Raises:
        ValueError: no case.
    """
    if not sent:
        raise ValueError("sent has no case: a picture of rounds needs the calls of one at least.")
    with course_style():
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        panels = figure.subplots(1, len(sent), sharex=True, squeeze=False)[0]
        for axes, (case, ways) in zip(panels, sent.items(), strict=True):
            for place, rows in enumerate(ways.values()):
                _draw_bar(axes, place, ring_rounds(rows, ranks, count))
            axes.set_yticks(range(len(ways)), [*ways])
            axes.set_ylim(len(ways) - 0.4, -0.6)
            axes.grid(False, axis="y")
            axes.set_title(case, fontsize=12)
            axes.set_xlabel("rounds in a step")
        panels[0].set_xlim(right=1.12 * panels[0].get_xlim()[1])  # room for the sums
        kinds = {
            _kind(*key)
            for ways in sent.values()
            for rows in ways.values()
            for key in ring_rounds(rows, ranks, count)
        }
        handles = {kind: _patch(kind) for kind in _KINDS if kind in kinds}
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=3, fontsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED, Evidence.PREDICTED], ["four ranks"])
    return figure


def _draw_bar(axes: Axes, place: int, rounds: Mapping[tuple[str, str], float]) -> None:
    sums = dict.fromkeys(_KINDS, 0.0)
    for key, count in rounds.items():
        sums[_kind(*key)] += count
    left = 0.0
    for kind, count in sums.items():
        color, hatch = _KINDS[kind]
        axes.barh(place, count, left=left, color=color, hatch=hatch, ec="white", height=0.7)
        left += count
    axes.text(left + 0.15, place, f"{left:.1f}", va="center", fontsize=10)


def _kind(collective: str, dtype: str) -> str:
    what = "gather parameters" if collective == "all-gather" else "reduce gradients"
    return f"{what}, {'bf16' if dtype == 'bfloat16' else 'fp32'}"


def _patch(kind: str) -> Rectangle:
    color, hatch = _KINDS[kind]
    return Rectangle((0, 0), 1, 1, facecolor=color, hatch=hatch, edgecolor="white")


def draw_borders() -> Figure:
    """Two nodes of two GPUs, sharded over all four and within each node: what crosses the border."""
    with course_style():
        figure = Figure(figsize=(11, 3.7), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_nodes(left, "FSDP2: a quarter on each GPU", ("part 1", "part 2", "part 3", "part 4"))
        _arrows(left, "->", ((0, 1), (1, 3), (3, 2), (2, 0)))
        _say(left, "one ring through all GPUs: gathers and\nreductions cross in every micro-batch")
        _draw_nodes(right, "HSDP: a half on each GPU", ("half A", "half B", "half A", "half B"))
        _arrows(right, "<->", ((0, 1), (2, 3)))
        _arrows(right, "<->", ((0, 2), (1, 3)), ls="--")
        _say(right, "solid: gathers and reductions, in every micro-batch\n"
             "dashed: all-reduce of one half's gradients, once a step")  # fmt: skip
        title = "Who sends what across the border of a node"
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def _draw_nodes(axes: Axes, title: str, parts: Sequence[str]) -> None:
    """Node 0 holds the first two GPUs, one above the other; node 1 the others."""
    for node in (0, 1):
        left = _FAR * node
        frame = Rectangle((left, 0), 1.4, 2, facecolor="#f4f4f4", edgecolor="#777777")
        axes.add_patch(frame)
        axes.text(left + 0.7, 2.08, f"node {node}", ha="center", va="bottom", fontsize=11)
    for gpu, part in enumerate(parts):
        x, y = _centre(gpu)
        box = Rectangle((x - 0.5, y - 0.3), 1, 0.6, facecolor=LOOKS[Category.PARAMETERS].color)
        axes.add_patch(box)
        axes.text(x, y, f"GPU {gpu}\n{part}", ha="center", va="center", fontsize=10, color="white")
    axes.axvline((1.4 + _FAR) / 2, ymin=0.24, ymax=0.9, color="black", ls=":", lw=1.2)
    axes.set(xlim=(-0.2, _FAR + 1.6), ylim=(-0.7, 2.4))
    axes.set_title(title, fontsize=12)
    axes.axis("off")


def _centre(gpu: int) -> tuple[float, float]:
    return _FAR * (gpu // 2) + 0.7, 1.5 - (gpu % 2)


def _arrows(axes: Axes, style: str, pairs: Sequence[tuple[int, int]], ls: str = "-") -> None:
    for one, other in pairs:
        (x0, y0), (x1, y1) = _centre(one), _centre(other)
        right, up = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        start = (x0 + 0.5 * right, y0 + 0.3 * up)
        end = (x1 - 0.5 * right, y1 - 0.3 * up)
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=13, ls=ls, lw=1.6)
        )


def _say(axes: Axes, text: str) -> None:
    axes.text(_FAR / 2 + 0.7, -0.12, text, ha="center", va="top", fontsize=10.5)


def draw_kept(
    percents: Mapping[float, Mapping[str, Sequence[float]]],
    peaks_gb: Mapping[str, float],
    *,
    least_percent: float,
    title: str,
) -> Figure:
    """A panel for each network: by scheme its speed in percent of unsharded's, and from case to case.

    Args:
        percents: by the network's GB/s and scheme, the speed as predicted, then in each other case.
        peaks_gb: by scheme; the schemes stand in this order, the leanest lowest.
        least_percent: a dotted line stands there.
        title: of all panels.

    Raises:
        ValueError: no network.
    """
    if not percents:
        raise ValueError("percents has no network: a panel needs one at least.")
    names = sorted(peaks_gb, key=lambda name: peaks_gb[name])
    with course_style():
        figure = Figure(figsize=(12, 3.9), layout="constrained")
        panels = figure.subplots(1, len(percents), sharey=True, squeeze=False)[0]
        for axes, (network, found) in zip(panels, percents.items(), strict=True):
            for place, name in enumerate(names):
                shares = found[name]
                keeps = min(shares) >= least_percent
                color = LOOKS[Category.PARAMETERS].color if keeps else "#777777"
                axes.plot(
                    [min(shares), max(shares)],
                    [place, place],
                    color=color,
                    lw=6,
                    alpha=0.45,
                    solid_capstyle="butt",
                )
                axes.plot(shares[0], place, "o", color=color, ms=7)
            axes.axvline(least_percent, color="black", ls=":", lw=2)
            axes.set_title(f"{network:g} GB/s a node", fontsize=12, loc="left")
            axes.set_xlabel("speed, percent of unsharded")
            axes.set_xlim(right=max(106, axes.get_xlim()[1]))
            axes.grid(False, axis="y")
        panels[0].set_yticks(
            range(len(names)), [f"{name}, {peaks_gb[name]:.1f} GB" for name in names]
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


__all__ = ["draw_borders", "draw_kept", "draw_rounds"]

check_public(globals())
