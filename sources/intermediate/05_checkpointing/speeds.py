"""Recorded speed against recorded peak: which way is fastest within so many bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .tradeoff import worth_taking

__all__ = ["draw_speeds", "fastest"]

THOUSAND = 1000
# The mark of each way, where its number stands (points), and its bar (GiB beside the mark).
MARKS = {"o": ((-4, 9), 0.0), "s": ((9, -4), 0.5), "^": ((-14, -12), -0.5), "D": ((-16, 2), 0.0)}
COLORS = dict(
    zip(MARKS, ("#222222", "#0072b2", "#d55e00", "#007a5a"), strict=True)
)  # of lines, too
SAME = 0.01  # a point that another beats in speed within this share of its memory is beaten


def fastest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that no other beats in both reserved memory and tokens a second, by their memory."""
    points = {(row["reserved_peak_bytes"], -row["tokens_per_second"]): row for row in rows}
    front = worth_taking(list(points))
    return [
        points[int(peak), slowness]
        for peak, slowness in front
        if not any(p <= (1 + SAME) * peak and s < slowness for p, s in front)
    ]


def draw_speeds(
    rows: Sequence[Mapping[str, Any]],
    *,
    token_flops: float,
    peak_flops: float,
    device: str,
    title: str,
    room_bytes: int,
) -> Figure:
    """A line for each way over the sequences of a step; what no other beats is filled.

    Args:
        rows: of the record `gpt1b_recompute`.
        token_flops: operations of a token without any recomputation, for the utilization (MFU).
        peak_flops: of the device, dense, a second.
        device: and the day, for the corner.
        title: with the setting.
        room_bytes: what a smaller card leaves, drawn as a line.

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
        right.set_ylabel(
            f"MFU (% of {peak_flops / 1e12:.0f} TFLOP/s; the second run not counted)", fontsize=9
        )
        axes.axvline(room_bytes / GIB, color="black", ls="--", lw=1.5, zorder=0)
        axes.text(
            room_bytes / GIB + 0.5,
            1.0,
            f"{room_bytes / GIB:.1f} GiB: what a 40 GB card leaves",
            rotation=90,
            va="bottom",
            fontsize=9,
        )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("reserved in a step (GiB)")
        axes.set_ylabel("tokens a second (thousands)")
        axes.set_title(title)
        axes.legend(
            loc="lower right",
            title="numbers: sequences a step;\nbars, beside: the range of five steps;\nfilled: no other is faster\nfor up to 1% more memory",
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
    color = COLORS[mark]
    place, beside = MARKS[mark]
    x = [row["reserved_peak_bytes"] / GIB for row in rows]
    y = [row["tokens_per_second"] / THOUSAND for row in rows]
    axes.plot(x, y, color=color, lw=1.0, marker=mark, mfc="white", mec=color, label=way)
    for row, across, up in zip(rows, x, y, strict=True):
        tokens = row["tokens_per_second"] * row["median_step_seconds"] / THOUSAND
        ends = [
            tokens / seconds for seconds in (max(row["step_seconds"]), min(row["step_seconds"]))
        ]
        axes.plot([across + beside] * 2, ends, color=color, lw=1.2, zorder=1)
        if any(row is other for other in best):
            axes.plot([across], [up], mark, color=color, mec=color, markersize=9, zorder=3)
        number = str(row["micro_batch"])
        axes.annotate(
            number, (across, up), place, textcoords="offset points", fontsize=9, color=color
        )


check_public(globals())
