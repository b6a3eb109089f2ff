"""The pictures of lesson 19 at real size: what moves in a step, who sends what, and what a card holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

_ROWS, _WEIGHTS, _EXPERTS = "#bd1f01", "#2a6db0", "#832db6"


_LINES = (("-", _WEIGHTS, 2.5), (":", _WEIGHTS, 2.0), ("--", _ROWS, 2.5), ("-.", _ROWS, 1.5))


def draw_choice(
    seconds: Callable[..., float],
    ways: Mapping[str, tuple[Any, float, bool]],
    crossings: Mapping[float, Sequence[int]],
    link_rate: float,
) -> Figure:
    """A step's time over that of computing at load 1, by a rank's tokens, a panel for each speed of computing.

    Args:
        seconds: of a step, by (layout, tokens, TFLOP/s, load, whether weights hide).
        ways: {name: (layout, load, whether weights hide)}: weights that hide, weights that do not, rows at two loads.
        crossings: {TFLOP/s: tokens at which rows at these two loads take as long as weights that hide}.
        link_rate: GB/s of one rank, at which rows and weights were reckoned.
    """
    tokens = [2 ** (power / 4) for power in range(32, 55)]
    rows = list(ways.values())[2:]
    with course_style():
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")
        places = figure.subplots(1, len(crossings), sharey=True)
        for axes, (speed, counts) in zip(places, crossings.items(), strict=True):

            def over(n: float, layout: Any, load: float, hides: bool, at: float = speed) -> float:
                return seconds(layout, n, at, load, hides) / seconds((0.0, 0.0), n, at, 1, True)

            for (name, way), (line, color, wide) in zip(ways.items(), _LINES, strict=True):
                label = name if axes is places[0] else ""
                times = [over(n, *way) for n in tokens]
                axes.plot(tokens, times, line, color=color, lw=wide, label=label)
            for count, way in zip(counts, rows, strict=True):
                time = over(count, *way)
                axes.plot(count, time, "o", ms=7, color="white", markeredgecolor="black", zorder=4)
                axes.text(count * 0.93, time - 0.04, f"{count:,}", ha="right", va="top", fontsize=10)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_xticks([2**n for n in (8, 10, 11, 12, 13)], ["256", "1k", "2k", "4k", "8k"])
            axes.set_ylim(0.95, 2.6)
            axes.set_title(f"{speed:g} TFLOP/s", fontsize=11)
            axes.set_xlabel("tokens a rank")
        places[0].set_ylabel("time of a step / computing at load 1")
        figure.suptitle(
            f"Qwen3-30B-A3B on 8 H100, bf16, NVLink at {link_rate:.0f} GB/s, layers recomputed,\n"
            "gradients summed in fp32, sequences of at most 4,096 tokens",
            fontsize=11,
            weight="bold",
        )
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


_WHITE = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"}

_PARTS = (
    ("parameters", "#3f90da", ""),
    ("Adam's moments", "#832db6", ""),
    ("gradients", "#ffa90e", "//"),
    ("copies of vectors", "#bd1f01", "\\\\"),
    ("inside the experts", "#e8a195", ".."),
    ("other activations", "#92dadd", "xx"),
    ("gathered weights, logits, temporaries", "#cccccc", ""),
)


def peak_parts(bytes_by_category: Mapping[str, int], copies: int, inside: int) -> list[float]:
    """GiB of each part of a bar; `copies` and `inside` are taken out of activations that are as many."""
    size = {str(category): n for category, n in bytes_by_category.items()}
    first = [size.pop(name, 0) for name in ("parameters", "optimizer state", "gradients")]
    kept = size.pop("activations", 0)
    known = [copies, inside] if kept > copies + inside else [0, 0]
    parts = [*first, *known, kept - sum(known), sum(size.values())]
    return [part / 2**30 for part in parts]


def draw_peaks(bars: Mapping[str, Sequence[float]], limit_gib: float) -> Figure:
    """Bars of GiB at the peak, {name: the parts in `_PARTS`' order}, beside what a card leaves usable."""
    with course_style():
        figure, axes = empty_figure(height=1.9 + 0.62 * len(bars))
        for row, parts in enumerate(bars.values()):
            left = 0.0
            for size, (name, color, hatch) in zip(parts, _PARTS, strict=True):
                label = "" if row else name
                axes.barh(row, size, left=left, height=0.6, color=color, hatch=hatch, label=label)
                if size > 3.9:
                    box = {"boxstyle": "round,pad=0.15", "fc": "white", "alpha": 0.85, "lw": 0}
                    axes.text(left + size / 2, row, f"{size:.1f}", ha="center", va="center", fontsize=9.5, bbox=box)  # fmt: skip
                left += size
            axes.text(96, row, f"{left:.1f} GiB", va="center", fontsize=11)
        axes.axvline(limit_gib, color="black", ls="--")
        axes.text(limit_gib - 1, -0.5, f"{limit_gib:.1f}: usable of an H100", ha="right", va="bottom", fontsize=10)  # fmt: skip
        axes.set_yticks(range(len(bars)), list(bars))
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.5, -0.95)
        axes.set_xlim(0, 110)
        axes.set_xticks(range(0, 100, 20))
        axes.set_xlabel(
            "GiB of one rank at its peak; a bar without gradients peaks before the first is made",
            fontsize=11,
        )
        axes.set_title(
            "Qwen3-30B-A3B on 8 H100, 4,096 tokens a rank, fp32 states: peaks",
            fontsize=12,
        )
        axes.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=3, fontsize=9.5)
        print_evidence(figure, [Evidence.SIMULATED])
    return figure


def draw_crossing(
    layouts: Mapping[str, tuple[float, float, float]], inside_rate: float, across_rate: float
) -> Figure:
    """Two nodes for each layout, what crosses between them, and how much of it in a step.

    Args:
        layouts: {name: (GB of rows inside the node, GB of rows across, GB of weights and gradients across)},
            first replicas in both nodes, then rows for each expert, then rows for each node.
        inside_rate: GB/s of one rank inside its node.
        across_rate: GB/s of one rank between nodes.
    """
    draws = (_draw_replicas, _draw_rows, _draw_once)
    with course_style():
        figure = Figure(figsize=(9.0, 5.4), layout="constrained")
        places = figure.subplots(1, len(layouts))
        for axes, draw, (name, parts) in zip(places, draws, layouts.items(), strict=True):
            inside, rows, weights = parts
            axes.set_axis_off()
            for node, y in ((0, 0.62), (1, 0.08)):
                corner = (0.04, y)
                box = FancyBboxPatch(
                    corner, 0.92, 0.3, boxstyle="round,pad=0.02", fc="none", ec="black"
                )
                axes.add_patch(box)
                axes.text(0.05, y, f"node {node}", fontsize=10)
            draw(axes)
            across = rows + weights
            said = (
                f"across: {across:.1f} GB, {across / across_rate:.2f} s\n"
                f"inside: {inside:.1f} GB, {inside / inside_rate:.2f} s"
            )
            axes.text(0.5, -0.03, said, ha="center", va="top", fontsize=10)
            axes.set_xlim(0, 1)
            axes.set_ylim(-0.16, 0.96)
            axes.set_title(name, fontsize=11)
        figure.suptitle(
            "What a rank of two nodes sends for its experts: Qwen3-30B-A3B, 4,096 tokens, bf16, layers recomputed,\n"
            f"load 1, gradients summed in fp32; {inside_rate:.0f} GB/s inside a node, {across_rate:.0f} GB/s across",
            weight="bold", fontsize=11,
        )  # fmt: skip
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


_PLACES = (0.2, 0.4, 0.6, 0.8)


def _draw_replicas(axes: Axes) -> None:
    for y in (0.62, 0.08):
        axes.scatter(0.5, y + 0.26, s=60, color=_ROWS, edgecolor="black", zorder=3)
        for eighth in range(8):
            x = 0.15 + eighth * 0.1
            axes.scatter(x, y + 0.1, s=45, marker="s", color=_EXPERTS, edgecolor="black", zorder=3)
            _row(axes, (0.5, y + 0.24), (x, y + 0.13), 1)
    axes.text(0.96, 0.62, "its 8 experts", ha="right", fontsize=10)
    axes.text(0.96, 0.08, "their replicas", ha="right", fontsize=10)
    look = {"arrowstyle": "<->", "color": _WEIGHTS, "ls": "--", "lw": 3}
    axes.annotate("", (0.25, 0.6), (0.25, 0.4), arrowprops=look)
    said = "weights and\ngradients of\nreplicas"
    axes.text(0.33, 0.5, said, color=_WEIGHTS, va="center", fontsize=10)


def _draw_rows(axes: Axes) -> None:
    _draw_ends(axes)
    for x in _PLACES:
        _row(axes, (0.5, 0.71), (x, 0.23), 2)
    axes.text(0.5, 0.5, "a row for each expert,\nand one back", ha="center", va="center", fontsize=10, bbox=_WHITE, zorder=3)  # fmt: skip


def _draw_once(axes: Axes) -> None:
    _draw_ends(axes)
    axes.scatter(0.5, 0.33, s=60, color=_ROWS, edgecolor="black", zorder=3)
    _row(axes, (0.5, 0.71), (0.5, 0.35), 2)
    for x in _PLACES:
        _row(axes, (0.5, 0.32), (x, 0.21), 1)
    axes.text(0.5, 0.5, "the vector once, and\none weighted sum back", ha="center", va="center", fontsize=10, bbox=_WHITE, zorder=3)  # fmt: skip


def _draw_ends(axes: Axes) -> None:
    axes.scatter(0.5, 0.74, s=60, color=_ROWS, edgecolor="black", zorder=3)
    axes.text(0.5, 0.81, "a token's vector", ha="center", fontsize=10)
    axes.scatter(
        _PLACES, (0.18,) * 4, s=60, marker="s", color=_EXPERTS, edgecolor="black", zorder=3
    )
    axes.text(0.96, 0.08, "4 of its 8 experts", ha="right", fontsize=10)


def _row(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _ROWS, "lw": width})
