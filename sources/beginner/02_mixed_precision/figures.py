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
        axes.annotate(
            text,
            point,
            xytext=(0, -16),
            textcoords="offset points",
            ha=_side(axes.get_xlim(), point),
        )
    return figure


def _side(limits: tuple[float, float], point: tuple[float, float]) -> str:
    """To which side a text may go without leaving the picture."""
    return "right" if point[0] > sum(limits) / 2 else "left"
