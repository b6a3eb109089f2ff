"""The pictures of lesson 19 at real size: what moves in a step, who sends what, and what a card holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

_ROWS, _WEIGHTS, _EXPERTS = "#bd1f01", "#2a6db0", "#832db6"


def draw_loads(
    load_of: Callable[..., float], constants: Sequence[Mapping[str, float]], assumed: str
) -> Figure:
    """The load up to which rows are faster than weights, by a rank's tokens: a panel for each way weights may travel.

    Args:
        load_of: that load, by (tokens, overlap=..., slower=..., **changed).
        constants: each with one of them changed; the band is their least and most.
        assumed: constants, as the title says them.
    """
    tokens = [2 ** (power / 8) for power in range(72, 113)]
    with course_style():
        figure = Figure(figsize=(9.0, 4.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        said = "weights overlap computing", "computing waits for weights"
        for axes, overlap, name in zip(panels, (True, False), said, strict=True):
            found = [
                [load_of(n, overlap=overlap, **changed) for n in tokens]
                for changed in ({}, *constants)
            ]
            low, high = ([pick(loads) for loads in zip(*found, strict=True)] for pick in (min, max))
            slow = [load_of(n, overlap=overlap, slower=2) for n in tokens]
            axes.fill_between(
                tokens, low, high, color=_WEIGHTS, alpha=0.18, lw=0,
                label="speed or link halved or doubled",
            )  # fmt: skip
            axes.plot(tokens, found[0], color=_WEIGHTS, lw=2.8, label="as assumed")
            axes.plot(tokens, slow, "--", color=_EXPERTS, lw=2.0, label="FSDP's experts at half speed")  # fmt: skip
            axes.text(560, 1.1, "below: EP 8\nis faster", fontsize=11)
            axes.text(15_000, 5.4, "above: FSDP\nalone is faster", fontsize=11, ha="right")
            axes.set_xscale("log", base=2)
            axes.set_xticks([2**n for n in range(10, 15)], ["1k", "2k", "4k", "8k", "16k"])
            axes.set_yscale("log", base=2)
            axes.set_yticks([1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"])
            axes.minorticks_off()
            axes.set_xlim(512, 2**14)
            axes.set_ylim(1, 8)
            axes.set_xlabel("tokens a rank and micro-batch")
            axes.set_title(name, fontsize=11)
        panels[0].set_ylabel("load of EP 8")
        figure.suptitle(
            f"Where both take equally long: Qwen3-30B-A3B on 8 H100, bf16, {assumed},\n"
            "layers recomputed, gradients summed in fp32, rows exposed in full",
            weight="bold", fontsize=11,
        )  # fmt: skip
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10)  # fmt: skip
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
            "GiB of one rank at its peak, at another moment in each bar: the first lies before any gradient",
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
            f"load 1, gradients summed in fp32; {inside_rate:.0f} GB/s inside a node, {across_rate:.0f} GB/s across, both at once",
            weight="bold", fontsize=11,
        )  # fmt: skip
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


_PLACES = (0.2, 0.4, 0.6, 0.8)


def _draw_replicas(axes: Axes) -> None:
    for y in (0.62, 0.08):
        axes.scatter(0.5, y + 0.26, s=60, color=_ROWS, edgecolor="black", zorder=3)
        for rank in range(8):
            x, asked = 0.15 + rank * 0.1, rank in (0, 2, 3, 5, 7)
            face = _EXPERTS if asked else "white"
            axes.scatter(x, y + 0.1, s=45, marker="s", color=face, edgecolor="black", zorder=3)
            if asked:
                _row(axes, (0.5, y + 0.24), (x, y + 0.13), 1)
    axes.text(0.96, 0.62, "its experts, on 5 of 8 ranks", ha="right", fontsize=10)
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
    for x in (0.14, 0.28, 0.72, 0.86):
        axes.scatter(x, 0.68, s=60, marker="s", color=_EXPERTS, edgecolor="black", zorder=3)
        _row(axes, (0.48 if x < 0.5 else 0.52, 0.74), (x + (0.03 if x < 0.5 else -0.03), 0.69), 1)
    axes.scatter(
        _PLACES, (0.18,) * 4, s=60, marker="s", color=_EXPERTS, edgecolor="black", zorder=3
    )
    axes.text(0.96, 0.08, "4 of its 8 experts", ha="right", fontsize=10)


def _row(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _ROWS, "lw": width})
