"""Recorded speed against recorded peak: which way is fastest within so many bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import LOOKS, Category, course_style, empty_figure, print_evidence

from .tradeoff import worth_taking

__all__ = ["draw_speeds", "fastest"]

THOUSAND = 1000
MARKS = {"o": (-4, 8), "s": (8, -4), "^": (-12, -12), "D": (-14, 2)}  # and where a number stands


def fastest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that no other beats in both peak and tokens a second, by their peak."""
    points = {(row["requested_peak_bytes"], -row["tokens_per_second"]): row for row in rows}
    return [points[int(peak), slowness] for peak, slowness in worth_taking(list(points))]


def draw_speeds(
    rows: Sequence[Mapping[str, Any]],
    *,
    token_flops: float,
    peak_flops: float,
    device: str,
    title: str,
) -> Figure:
    """A line for each way over the sequences of a step; what no other beats is filled.

    Args:
        rows: of the record `gpt1b_recompute`.
        token_flops: operations of a token without any recomputation, for the utilization (MFU).
        peak_flops: of the device, dense, a second.
        device: and the day, for the corner.
        title: with the setting.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("draw_speeds() needs a row or more.")
    best = fastest(rows)
    with course_style():
        figure, axes = empty_figure(height=4.8)
        for way, mark in zip(
            dict.fromkeys(row["checkpointed"] for row in rows), MARKS, strict=False
        ):
            _draw_way(axes, [row for row in rows if row["checkpointed"] == way], best, way, mark)
        utilization = 100 * THOUSAND * token_flops / peak_flops  # % a thousand tokens a second
        right = axes.secondary_yaxis(
            "right",
            functions=(
                lambda y: np.multiply(y, utilization),
                lambda u: np.divide(u, utilization),
            ),
        )
        right.set_ylabel(f"utilization (% of {peak_flops / 1e12:.0f} TFLOP/s)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("peak of a step: bytes requested (GiB)")
        axes.set_ylabel("tokens a second (thousands)")
        axes.set_title(title)
        axes.legend(
            loc="lower right", title="numbers: sequences a step;\nbars: the range of five steps"
        )
        print_evidence(figure, [Evidence.RECORDED], [device])
    return figure


def _draw_way(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    best: Sequence[Mapping[str, Any]],
    way: str,
    mark: str,
) -> None:
    color = LOOKS[Category.PARAMETERS].color
    x = [row["requested_peak_bytes"] / GIB for row in rows]
    y = [row["tokens_per_second"] / THOUSAND for row in rows]
    axes.plot(x, y, color="#717581", lw=0.8, marker=mark, mfc="white", mec="black", label=way)
    for row, across, up in zip(rows, x, y, strict=True):
        tokens = row["tokens_per_second"] * row["median_step_seconds"] / THOUSAND
        ends = [
            tokens / seconds for seconds in (max(row["step_seconds"]), min(row["step_seconds"]))
        ]
        axes.plot([across, across], ends, color="black", lw=1.2, zorder=1)
        if any(row is other for other in best):
            axes.plot([across], [up], mark, color=color, mec="black", markersize=9, zorder=3)
        number, place = str(row["micro_batch"]), (across, up)
        axes.annotate(number, place, MARKS[mark], textcoords="offset points", fontsize=9)


check_public(globals())
