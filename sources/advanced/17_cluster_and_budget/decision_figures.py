"""When spot pays, and which option wins under which weights and prices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .decision import Ranked
from .scaling_figures import LOOKS

FILLS = [
    ("#a8c8e4", ""),
    ("#f6c48f", "//"),
    ("#d9d9d9", ".."),
    ("#c9b3dc", "xx"),
    ("#ffffff", "||"),
    ("#b9ac70", "--"),
]


def draw_spot(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    points: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
) -> Figure:
    """Cost of a useful hour on spot over on demand, by how often a node is taken back.

    Args:
        lines: By name, (interruptions a node and day, cost over on demand) by formula.
        points: The same by simulation; names as in `lines`.
        title: Of the figure.

    Raises:
        ValueError: no line, or more than there are looks.
    """
    if not 1 <= len(lines) <= len(LOOKS):
        raise ValueError(f"draw_spot() draws 1 to {len(LOOKS)} lines; these are {len(lines)}.")
    with course_style():
        figure, axes = empty_figure(height=4.4)
        axes.set_xscale("log")
        for (name, line), (color, marker, dash) in zip(lines.items(), LOOKS, strict=False):
            axes.plot(*zip(*line, strict=True), ls=dash, color=color, label=name)
            if points.get(name):
                axes.plot(*zip(*points[name], strict=True), marker, color=color, ms=7)
        axes.axhline(1, color="black", lw=1)
        axes.annotate(
            "on demand costs the same",
            (0.01, 1),
            (0, 4),
            textcoords="offset points",
            xycoords=("axes fraction", "data"),
            fontsize=10,
        )
        axes.set_ylim(0, 2)
        axes.set_xlabel("how often each node is taken back (times a day)")
        axes.set_ylabel("spot over on demand")
        axes.set_title(title)
        axes.legend(fontsize=10, loc="upper left", bbox_to_anchor=(0, 0.9))
        print_evidence(figure, [Evidence.SIMULATED, Evidence.PREDICTED], ["points"])
    return figure


def draw_decision(
    ranked: Sequence[Ranked],
    grid: Sequence[Sequence[str]],
    shares: Sequence[float],
    prices: Sequence[float],
    *,
    title: str,
    weight_label: str,
    price_label: str,
    now: tuple[float, float],
) -> Figure:
    """Left: marks of each option, or why it is out. Right: the winner by weight and price.

    Args:
        ranked: From `decide`.
        grid: From `winners`: a row a price, a column a share.
        shares, prices: The grid's axes.
        title: Of the figure.
        weight_label, price_label: What the axes are.
        now: Share and price of the left part, marked with a cross.

    Raises:
        ValueError: the grid has another shape, or more winners than fills.
    """
    names = list(dict.fromkeys(name for row in grid for name in row))
    if len(grid) != len(prices) or any(len(row) != len(shares) for row in grid):
        raise ValueError("draw_decision(): the grid has one row a price and one column a share.")
    if len(names) > len(FILLS):
        raise ValueError(
            f"draw_decision() tells {len(FILLS)} winners apart; these are {len(names)}."
        )
    with course_style():
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _marks(left, ranked)
        looks_of = dict(zip(names, FILLS, strict=False))
        for row, bottom, top in zip(grid, *_borders(prices), strict=True):
            for cell, begin, end in zip(row, *_borders(shares), strict=True):
                color, hatch = looks_of[cell]
                right.add_patch(
                    Rectangle(
                        (begin, bottom),
                        end - begin,
                        top - bottom,
                        fc=color,
                        hatch=hatch,
                        ec="#555555",
                        lw=0,
                    )
                )
        right.autoscale_view()
        right.margins(0)
        right.plot(*now, "X", color="black", ms=11, mec="white")
        right.set_xlabel(weight_label)
        right.set_ylabel(price_label)
        right.grid(False)
        looks = [
            Patch(fc=color, hatch=hatch, ec="#555555", label=name or "none is left")
            for name, (color, hatch) in looks_of.items()
        ]
        right.legend(
            handles=looks, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=1
        )
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _borders(centers: Sequence[float]) -> tuple[list[float], list[float]]:
    """Where the cells around these values begin and end."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(centers)]
    first, last = centers[0], centers[-1]
    low = [2 * first - middles[0] if middles else first - 0.5, *middles]
    high = [*middles, 2 * last - middles[-1] if middles else last + 0.5]
    return low, high


def _marks(axes: Axes, ranked: Sequence[Ranked]) -> None:
    """Stacked marks by criterion; what is struck out as words."""
    rows = list(reversed(ranked))
    criteria = list(next((row.marks for row in ranked if row.marks), {}))
    for place, row in enumerate(rows):
        begin = 0.0
        for name, (color, _, _) in zip(criteria, LOOKS, strict=False):
            part = row.marks.get(name, 0.0)
            axes.barh(
                place,
                part,
                left=begin,
                color=color,
                height=0.6,
                label=name if row is ranked[0] else None,
            )
            begin += part
        if row.struck:
            axes.text(0.01, place, f"out: {row.struck}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.option.name for row in rows], fontsize=10)
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("marks (1: best in everything)")
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


__all__ = ["draw_decision", "draw_spot"]

check_public(globals())
