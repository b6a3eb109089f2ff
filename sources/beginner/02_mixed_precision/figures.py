"""Words on the lesson's figures of peaks: every batch on the axis, and the values that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def with_notes(
    figure: Figure, batches: Sequence[int], notes: Mapping[str, tuple[float, float]]
) -> Figure:
    """The figure of `draw_peaks` with these ticks, and a note below or beside each point.

    Args:
        figure: changed, and returned.
        batches: the ticks of its horizontal axis.
        notes: a text by the point that it belongs to, in the units of the axes.
    """
    axes = figure.axes[0]
    axes.set_xticks(batches)
    for text, point in notes.items():
        place, side = _place(axes.get_xlim(), axes.get_ylim(), point)
        axes.annotate(text, point, xytext=place, textcoords="offset points", ha=side)
    return figure


def with_recorded(
    figure: Figure, fp32_bytes: Mapping[int, float], mixed_bytes: Mapping[int, float]
) -> Figure:
    """The figure of `draw_peaks`, in GiB, with the peaks that a real GPU allocated, by batch.

    Args:
        figure: changed, and returned.
        fp32_bytes: peaks of the run in fp32, with TF32 convolutions.
        mixed_bytes: peaks under autocast in fp16.
    """
    axes = figure.axes[0]
    for peaks, marker, name in [(fp32_bytes, "x", "fp32 (TF32)"), (mixed_bytes, "+", "mixed")]:
        heights = [peak / 2**30 for peak in peaks.values()]
        axes.scatter(list(peaks), heights, s=90, c="black", marker=marker, zorder=4)
        axes.scatter([], [], s=90, c="black", marker=marker, label=f"{name}, recorded on an H200")
    axes.legend()
    return figure


def _place(
    across: tuple[float, float], up: tuple[float, float], point: tuple[float, float]
) -> tuple[tuple[float, float], str]:
    """Where a note stands beside a rising line: above it to the left, or below it to the right."""
    is_high = point[1] > sum(up) / 2
    if point[0] > sum(across) / 2 and is_high:
        return (-10, 6), "right"
    return (6, -16), "left"
