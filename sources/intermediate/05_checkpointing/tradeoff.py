"""Memory against what it costs: one point for each way, and the line of those worth taking."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.units import Category
from utils.views.style import LOOKS, byte_unit, course_style, empty_figure, print_evidence


def draw_tradeoff(
    measurements: Sequence[Measurement],
    costs: Sequence[float] | None = None,
    *,
    cost_label: str = "median step (ms)",
    limit_bytes: float | None = None,
    title: str = "Memory against its price",
) -> Figure:
    """The peak of each measurement over its cost.

    Costs that were counted or computed rank the measurements: a line joins those that no other one
    beats. Timed steps do not: each median stands within the range of its steps, and where ranges
    overlap, another run may change the order.

    Args:
        measurements: two or more.
        costs: one number for each; if None, the timed steps, median and range.
        cost_label: what the numbers are.
        limit_bytes: what a card has for tensors, drawn as a line.

    Raises:
        ValueError: fewer than two measurements, another number of costs, or no timed steps.
    """
    if len(measurements) < 2:
        raise ValueError("A trade-off needs two measurements or more.")
    is_timed = costs is None
    if costs is None:
        if untimed := [m.name for m in measurements if not m.step_seconds]:
            raise ValueError(f"Give costs=, or time the steps: none were timed in {untimed}.")
        costs = [1000 * (m.median_step_seconds or 0.0) for m in measurements]
    if len(costs) != len(measurements):
        raise ValueError(f"{len(costs)} costs do not belong to {len(measurements)} measurements.")
    peaks = [m.peak_bytes for m in measurements]
    unit_bytes, unit = byte_unit(max([*peaks, limit_bytes or 0]))
    points = [(cost, peak / unit_bytes) for cost, peak in zip(costs, peaks, strict=True)]
    with course_style():
        figure, axes = empty_figure()
        front = points if is_timed else worth_taking(points)
        if is_timed:
            _draw_ranges(axes, measurements, points)
        else:
            # Steps: between two ways there is none.
            axes.step(
                *zip(*front, strict=True),
                where="post",
                color="#717581",
                ls="--",
                lw=1.5,
                zorder=1,
                label="blue: any lower peak costs more",
            )
        for cost, peak in points:
            chosen = (cost, peak) in front
            color = LOOKS[Category.PARAMETERS if chosen else Category.TEMPORARIES].color
            axes.scatter([cost], [peak], s=90, color=color, edgecolor="black", zorder=2)
        labels = [
            axes.annotate(m.name, point, (8, 6), textcoords="offset points", fontsize=11)
            for point, m in zip(points, measurements, strict=True)
        ]
        if limit_bytes:
            axes.axhline(
                limit_bytes / unit_bytes, color="black", ls=":", label="what the card leaves"
            )
        axes.margins(x=0.4)  # room for the names, which stand right of their points
        axes.set_ylim(0, 1.15 * max([*peaks, limit_bytes or 0]) / unit_bytes)
        axes.set_xlim(left=max(axes.get_xlim()[0], -0.06 * max(costs)))  # a cost is no loss
        axes.set_xlabel(cost_label)
        kinds = sorted({str(m.evidence) for m in measurements})
        axes.set_ylabel(f"{' and '.join(kinds)} peak ({unit})")
        axes.set_title(title)
        axes.legend(loc="best")
        print_evidence(figure, [m.evidence for m in measurements], [m.device for m in measurements])
        _keep_apart(figure, labels)
    return figure


def _draw_ranges(
    axes: Axes, measurements: Sequence[Measurement], points: Sequence[tuple[float, float]]
) -> None:
    """From the shortest timed step to the longest, behind each median."""
    for m, (_, peak) in zip(measurements, points, strict=True):
        ends = [1000 * min(m.step_seconds), 1000 * max(m.step_seconds)]
        axes.plot(ends, [peak, peak], color="#717581", lw=2.5, zorder=1)
    counts = sorted({len(m.step_seconds) for m in measurements})
    steps = " to ".join(map(str, {counts[0]: 0, counts[-1]: 0}))
    axes.plot([], [], color="#717581", lw=2.5, label=f"range of {steps} steps")


def _keep_apart(figure: Figure, labels: Sequence[Annotation]) -> None:
    """Move a name below its point where it would stand on one that is placed already."""
    figure.draw_without_rendering()  # lays the axes out, so that places are known
    placed: list[Bbox] = []
    for label in labels:
        if any(label.get_window_extent().overlaps(box) for box in placed):
            label.set_position((8, -16))
        placed.append(label.get_window_extent())


def worth_taking(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both numbers, by the first."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


__all__ = ["draw_tradeoff"]

check_public(globals())
