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
HEIGHT = 2.1  # of the axis, in limits
WIDTH = 1.3  # of the axis, in the largest step


def card_bytes(run: Measurement) -> int:
    """What the card must hold: the allocator's reserved bytes where it tells them, else tensors."""
    return run.reserved_bytes or run.peak_bytes


def most_items(runs: Sequence[Measurement], limit: str | int) -> float:
    """Items a step at which the straight line through the outer two runs crosses the limit.

    Args:
        runs: two or more, of different `items`.
        limit: the budget, such as "24GB" or a count of bytes.

    Returns:
        0 where the line is over the limit from its start.

    Raises:
        ValueError: fewer than two sizes.
    """
    points = sorted((run.items, card_bytes(run)) for run in runs)
    if len(points) < 2:
        raise ValueError("A line needs measurements of two sizes or more.")
    (low, below), *_, (high, above) = points
    return max(0.0, low + (parse_bytes(limit) - below) * (high - low) / (above - below))


def draw_budget_map(
    runs: Mapping[str, Sequence[Measurement]],
    limit: str | int,
    *,
    title: str = "",
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """GB that the card must hold against the items of a step, and where each line meets the limit.

    Args:
        runs: name of a way to train -> two measurements or more; up to four names. A line is
            drawn through the outer two and beyond them; what lies between is drawn hollow.
        limit: the budget, such as "24GB" or a count of bytes.
        marks: name of a step -> its items, a line each.

    Raises:
        ValueError: no names or too many, or a name with fewer than two sizes.
    """
    if not 1 <= len(runs) <= len(LOOKS):
        raise ValueError(f"draw_budget_map: runs has {len(runs)} names; give one to four.")
    limit_gb, every = parse_bytes(limit) / GB, [run for line in runs.values() for run in line]
    with course_style():
        figure = Figure(figsize=(9.0, 5.6), layout="constrained")
        axes = figure.add_subplot()
        for (name, line), look in zip(runs.items(), LOOKS, strict=False):
            _draw_line(axes, name, line, limit, look)
        axes.axhline(limit_gb, color="black", lw=1.2)
        axes.text(
            0.72,  # left of where the flattest line may cross
            limit_gb,
            f"usable: {limit_gb:.1f} GB",
            transform=axes.get_yaxis_transform(),
            ha="center",
            va="bottom",
        )
        for name, items in (marks or {}).items():
            axes.axvline(items, color="#717581", lw=1.2, ls=(0, (1, 2)))
            axes.annotate(name, (items, 0), (4, 5), textcoords="offset points", fontsize=10)
        right = WIDTH * max(run.items for run in every)
        axes.set(xlim=(0, right), ylim=(0, HEIGHT * limit_gb))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(f"{every[0].unit} of a micro-batch")
        axes.set_ylabel("reserved, GB" if every[0].reserved_bytes else "peak, GB")
        axes.set_title(title or "What a step needs, and what the card has")
        figure.legend(loc="outside lower center", ncols=2)
        print_evidence(figure, [run.evidence for run in every])
    return figure


def _draw_line(
    axes: Axes, name: str, line: Sequence[Measurement], limit: str | int, look: tuple[str, str]
) -> None:
    """Its points, what lies between them hollow; its crossing is a ring, told in the legend."""
    color, style = look
    crossing, limit_gb = most_items(line, limit), parse_bytes(limit) / GB
    first, *between, last = sorted((run.items, card_bytes(run) / GB) for run in line)
    label = f"{name}: up to {crossing:,.0f} {line[0].unit}"
    axes.axline(first, last, color=color, ls=style[1:])
    axes.plot(*zip(first, last, strict=True), style[0], color=color, ls="none")
    axes.plot([], [], style, color=color, label=label)
    for point in between:
        axes.plot(*point, style[0], color=color, markersize=10, markerfacecolor="white")
    axes.plot(crossing, limit_gb, "o", color=color, markersize=13, markerfacecolor="none")


__all__ = ["card_bytes", "draw_budget_map", "most_items"]

check_public(globals())
