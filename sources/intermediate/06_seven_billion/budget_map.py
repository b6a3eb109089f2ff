"""How many tokens a step may have within a budget: a line of peaks for each way to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.memory import Measurement
from utils.units import GB, parse_bytes
from utils.views.style import course_style, print_evidence

LOOKS = (("#bd1f01", "o-"), ("#832db6", "s--"), ("#3f90da", "^-."), ("black", "D:"))
HEIGHT = 1.6  # of the axis, in limits


def most_items(runs: Sequence[Measurement], limit: str) -> float:
    """Items a step at which the straight line through the outer two peaks crosses the limit.

    Args:
        runs: two or more, of different `items`.
        limit: the budget, such as "24GB".

    Returns:
        0 where the line is over the limit from its start.

    Raises:
        ValueError: fewer than two sizes.
    """
    points = sorted((run.items, run.peak_bytes) for run in runs)
    if len(points) < 2:
        raise ValueError("A line needs measurements of two sizes or more.")
    (low, below), *_, (high, above) = points
    return max(0.0, low + (parse_bytes(limit) - below) * (high - low) / (above - below))


def draw_budget_map(
    runs: Mapping[str, Sequence[Measurement]], limit: str, *, title: str = ""
) -> Figure:
    """Peaks in GB against the items of a step, and where each line meets the limit.

    Args:
        runs: name of a way to train -> two measurements or more; up to four names. A line is
            drawn through the outer two and beyond them.
        limit: the budget, such as "24GB".

    Raises:
        ValueError: no names or too many, or a name with fewer than two sizes.
    """
    if not 1 <= len(runs) <= len(LOOKS):
        raise ValueError(f"draw_budget_map: runs has {len(runs)} names; give one to four.")
    top = HEIGHT * parse_bytes(limit) / GB
    with course_style():
        figure = Figure(figsize=(9.0, 4.8), layout="constrained")
        axes = figure.add_subplot()
        for number, ((name, line), look) in enumerate(zip(runs.items(), LOOKS, strict=False)):
            _draw_line(axes, name, line, limit, look, -14 - 14 * (number // 2))
        axes.axhline(parse_bytes(limit) / GB, color="black", lw=1.2)
        every = [run for line in runs.values() for run in line]
        axes.set(xlim=(0, 2 * max(run.items for run in every)), ylim=(0, top))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(f"{every[0].unit} of a step")
        axes.set_ylabel("peak, GB")
        axes.set_title(title or f"Peaks, and the line of {limit}")
        axes.legend(loc="lower right", framealpha=1.0)
        print_evidence(figure, [run.evidence for run in every])
    return figure


def _draw_line(
    axes: Axes,
    name: str,
    line: Sequence[Measurement],
    limit: str,
    look: tuple[str, str],
    below: int,
) -> None:
    """`below`: points under the limit where its crossing stands; steep lines cross close together."""
    color, style = look
    crossing = most_items(line, limit)
    first, *_, last = sorted((run.items, run.peak_bytes / GB) for run in line)
    axes.plot(*zip(first, last, strict=True), style[0], color=color, ls="none", label=name)
    axes.axline(first, last, color=color, ls=style[1:])
    place = (crossing, parse_bytes(limit) / GB)
    axes.annotate(f"{crossing:,.0f}", place, (6, below), textcoords="offset points", color=color)


__all__ = ["draw_budget_map", "most_items"]

check_public(globals())
