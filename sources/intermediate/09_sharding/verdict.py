"""Who sends what across a node's border, in how many rounds; and what saved memory costs in speed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.checked import check_public
from utils.planner.cluster import PLAIN_PORT
from utils.traffic.collectives import Traffic
from utils.units import GB, Category, Evidence
from utils.views.style import LOOKS, course_style, print_evidence

from .ways import ring_bytes

_KINDS = {
    "gather parameters, bf16": ("#92dadd", "//"),
    "reduce gradients, bf16": (LOOKS[Category.GRADIENTS].color, ""),
    "reduce gradients, fp32": (LOOKS[Category.GRADIENTS].color, "xx"),
}
_MARKERS = ("o", "s", "h", "^", "v", "D", "P")
_LINES = ("-", "--", (0, (3, 1, 1, 1)), ":", "-.", (0, (1, 1)), (0, (5, 1)))
_FAR = 2.6  # from one node to the next


def draw_rounds(
    sent: Mapping[str, Mapping[str, Iterable[Traffic]]],
    ranks: int,
    round_bytes: float,
    *,
    title: str,
) -> Figure:
    """A panel for each case, a bar for each way: rounds that a rank sends in a step, by kind.

    Args:
        sent: by case and way, the calls of one rank.
        ranks: of the ring.
        round_bytes: that a rank sends when every parameter goes round once.
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
                sizes = ring_bytes(rows, ranks)
                _draw_bar(axes, place, {key: size / round_bytes for key, size in sizes.items()})
            axes.set_yticks(range(len(ways)), [*ways])
            axes.set_ylim(len(ways) - 0.4, -0.6)
            axes.grid(False, axis="y")
            axes.set_title(case, fontsize=12)
            axes.set_xlabel("rounds of 2P(N-1)/N bytes in a step")
        panels[0].set_xlim(right=1.12 * panels[0].get_xlim()[1])  # room for the sums
        handles = {kind: _patch(kind) for kind in _KINDS}
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=3, fontsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED, Evidence.PREDICTED], ["four ranks"])
    return figure


def _draw_bar(axes: Axes, place: int, rounds: Mapping[tuple[str, str], float]) -> None:
    sums = dict.fromkeys(_KINDS, 0.0)
    for (collective, dtype), count in rounds.items():
        what = "gather parameters" if collective == "all-gather" else "reduce gradients"
        sums[f"{what}, {'bf16' if dtype == 'bfloat16' else 'fp32'}"] += count
    left = 0.0
    for kind, count in sums.items():
        color, hatch = _KINDS[kind]
        axes.barh(place, count, left=left, color=color, hatch=hatch, ec="white", height=0.7)
        left += count
    axes.text(left + 0.15, place, f"{left:.1f}", va="center", fontsize=10)


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


def draw_verdict(
    peaks_gb: Mapping[str, float],
    speeds: Mapping[str, Sequence[float]],
    rates_gb: Sequence[float],
    *,
    least_percent: float,
    lines: Collection[str],
    titles: tuple[str, str],
) -> Figure:
    """Memory over speed on the fastest network, a point for each scheme; and speed over the network's rate.

    Args:
        peaks_gb: by scheme, of one GPU.
        speeds: by scheme, tokens per second at each rate; drawn as percent of the first scheme's.
        rates_gb: that a node sends to others in a second, rising. No line joins those of TCP to those
            of InfiniBand.
        least_percent: a dotted line stands there in both panels.
        lines: the schemes of the second panel.
        titles: of both panels.
    """
    slow = sum(rate * GB < PLAIN_PORT for rate in rates_gb)
    name, first = next(iter(speeds.items()))
    shares = {
        scheme: [100 * own / its for own, its in zip(found, first, strict=True)]
        for scheme, found in speeds.items()
    }
    with course_style():
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, (scheme, percent) in enumerate(shares.items()):
            point = (percent[-1], peaks_gb[scheme])
            (mark,) = left.plot(*point, _MARKERS[number], ms=10)
            up = 9 if number % 2 else -17  # neighbours above and below
            left.annotate(
                scheme, point, (0, up), textcoords="offset points", ha="center", fontsize=10
            )
            if scheme not in lines:
                continue
            for part, line in ((slice(slow), ""), (slice(slow, None), _LINES[number])):
                right.plot(
                    rates_gb[part], percent[part], _MARKERS[number], ls=line, ms=7,
                    color=mark.get_color(), label=scheme if line else None,
                )  # fmt: skip
        says = f"tokens/s in percent of {name}"
        left.set(xlabel=f"{says}, at {rates_gb[-1]:g} GB/s", ylabel="peak of one GPU (GB)")
        left.margins(x=0.12)
        left.set_ylim(0, 1.2 * max(peaks_gb.values()))
        left.axvline(least_percent, color="#777777", ls=":", lw=1.5, zorder=0)
        right.axhline(least_percent, color="#777777", ls=":", lw=1.5, zorder=0)
        right.set_xscale("log")
        right.set_xticks(rates_gb, [f"{rate:g}" for rate in rates_gb])
        right.minorticks_off()
        right.set(xlabel="line rate of a node's network (GB/s)", ylabel=says)
        right.set_ylim(0, 125)
        if 0 < slow < len(rates_gb):
            _border(right, math.sqrt(rates_gb[slow - 1] * rates_gb[slow]))
        right.legend(fontsize=10, loc="lower right")
        for axes, title in zip((left, right), titles, strict=True):
            axes.set_title(title, fontsize=12, loc="left")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _border(axes: Axes, at: float) -> None:
    """Between networks whose links the planner reckons by two shares of their line rate."""
    axes.axvline(at, color="#777777", ls=":", lw=1.2)
    for says, side in (("TCP  ", "right"), ("  InfiniBand", "left")):
        axes.text(at, 122, says, ha=side, va="top", fontsize=10, color="#555555")


__all__ = ["draw_borders", "draw_rounds", "draw_verdict"]

check_public(globals())
