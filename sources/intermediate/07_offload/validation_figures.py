"""Predicted against published, source by source: every ratio, and the errors of other rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.units import Evidence
from utils.views.style import course_style, print_evidence

if TYPE_CHECKING:
    from evidence.validation.comparison import Summary
    from evidence.validation.peers import PeerError

OURS, RATIO = "#bd1f01", "#3f90da"
MARKERS = ("X", "s", "^", "D", "v", "P")
OTHERS = ("#717581", "#832db6", "#e76300", "#a96b59", "#ffa90e", "#94a4a2")
FARTHEST = 4.0  # ratios from 1/4 to 4 are drawn
FEW = 20  # so many dots can be large, above the bar
TICKS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
NAIVE = "naive rule, its constant fitted"


def draw_validation(
    summaries: Sequence[Summary],
    peers: Sequence[PeerError] = (),
    *,
    title: str = "Every published number",
) -> Figure:
    """Two panels with a row for each source and quantity.

    Left: predicted over published, one dot a published number, with a bar over the middle 80%.
    Right: the median absolute error, beside that of the naive rule and of other tools.

    Args:
        summaries: `summarize` of what `compare_all` gave.
        peers: What `compare_peers` gave.
        title: Of the left panel.

    Raises:
        ValueError: no summaries.
    """
    if not summaries:
        raise ValueError("draw_validation() needs summaries; summarize(compare_all()) gives them.")
    with course_style():
        figure = Figure(figsize=(10.5, 1.9 + 0.38 * len(summaries)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _draw_ratios(left, summaries)
        left.set_title(title)
        _draw_errors(right, summaries, peers)
        names = [f"{row.source}\n{row.quantity}, {row.rows} rows" for row in summaries]
        left.set_yticks(range(len(names)), names, fontsize=9)
        left.set_ylim(len(names) - 0.5, -0.5)
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


def _draw_ratios(axes: Axes, summaries: Sequence[Summary]) -> None:
    jitter, reach = np.random.default_rng(0), 0.5
    for height, summary in enumerate(summaries):
        ratios = np.clip(summary.ratios, 1 / FARTHEST, FARTHEST)
        reach = max(reach, 1.1 * float(np.abs(np.log2(ratios)).max()))
        places = height + jitter.uniform(-0.25, 0.25, len(ratios))
        size, alpha, layer = (26, 0.9, 3) if len(ratios) < FEW else (7, 0.45, 1)
        axes.scatter(ratios, places, s=size, color=RATIO, alpha=alpha, linewidths=0, zorder=layer)
        ends = np.quantile(ratios, (0.1, 0.9))
        axes.plot(ends, [height, height], color="black", lw=2.5, solid_capstyle="butt", zorder=2)
    axes.axvline(1.0, color="black", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(2.0**-reach, 2.0**reach)
    ticks = [tick for tick in TICKS if abs(math.log2(tick)) <= reach]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("predicted / published; the bar holds 80%")


def _draw_errors(axes: Axes, summaries: Sequence[Summary], peers: Sequence[PeerError]) -> None:
    tools = [NAIVE, *dict.fromkeys(peer.tool for peer in peers if peer.tool != "this planner")]
    looks = dict(zip(tools, zip(MARKERS, OTHERS, strict=True), strict=False))
    points: dict[str, list[tuple[float, int]]] = {tool: [] for tool in tools}
    for height, row in enumerate(summaries):
        if row.baseline is not None:
            points[NAIVE].append((row.baseline, height))
        for peer in peers:
            if peer.tool in points and peer.source == row.source and _is_peak(row):
                points[peer.tool].append((peer.median, height))
    for tool, found in points.items():
        marker, color = looks[tool]
        axes.scatter(*_columns(found), marker=marker, color=color, s=45, label=tool)
    ours = [(row.median, height) for height, row in enumerate(summaries)]
    axes.scatter(*_columns(ours), marker="o", color=OURS, s=55, label="this planner", zorder=3)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%")
    axes.set_xlabel("median absolute error")
    axes.set_title("Beside simpler rules")


def _is_peak(row: Summary) -> bool:
    """Other tools are asked for the memory of a step's peak alone."""
    return row.quantity in ("peak bytes", "reserved GiB", "nvidia-smi GB")


def _columns(points: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [x for x, _ in points if math.isfinite(x)], [y for x, y in points if math.isfinite(x)]
