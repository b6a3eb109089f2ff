"""Bars of memory by category: one per measurement or prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.memory.measurement import Measurement
from utils.memory.timeline import Breakdown
from utils.units import Category, Evidence, format_bytes, parse_bytes
from utils.views.style import (
    LOOKS,
    byte_unit,
    course_style,
    empty_figure,
    print_evidence,
    wrapped,
)

CHARACTER_WIDTH = 0.0135  # of the axis: a part narrower than its number gets none inside
LINE_INCHES = 0.23  # of a row's name
NARROWEST_VISIBLE = 1 / 400  # of the longest bar: less than that is no line on a screen


@dataclass(frozen=True)
class Bar:
    """One bar: a name, bytes by category, and where the numbers come from."""

    name: str
    breakdown: Breakdown
    evidence: Evidence
    device: str = ""


def predicted(name: str, bytes_by_category: Mapping[str, float]) -> Bar:
    """A prediction to draw beside measurements: `predicted("my formula", {"parameters": 4 * P})`.

    Raises:
        ValueError: a name is no category, or a size is negative.
    """
    for key, size in bytes_by_category.items():
        if key not in list(Category):
            raise ValueError(f"{key!r} is no category; use one of {', '.join(Category)}.")
        if size < 0:
            raise ValueError(f"A size cannot be negative; {key!r} is {size}.")
    sizes = {Category(key): int(size) for key, size in bytes_by_category.items()}
    return Bar(name, Breakdown(sizes), Evidence.PREDICTED)


def as_bar(item: Measurement | Bar) -> Bar:
    """A measurement as a bar of its peak."""
    if isinstance(item, Bar):
        return item
    return Bar(item.name, item.breakdown, item.evidence, item.device)


def draw_breakdown(
    items: Sequence[Measurement | Bar],
    *,
    title: str = "Memory at the peak",
    limit: str = "",
    unit: str = "",
) -> Figure:
    """Stacked horizontal bars of bytes by category; `limit` ("16GB") draws a card's memory.

    `unit` is "GB" or "MB" where the text beside it counts in those; else a binary one is chosen.

    Raises:
        ValueError: nothing to draw, or an unknown unit.
    """
    if not items:
        raise ValueError("draw_breakdown() needs at least one measurement or prediction.")
    bars = [as_bar(item) for item in items]
    names = [f"{wrapped(bar.name)}\n({bar.evidence})" for bar in bars]
    row_inches = max(0.75, LINE_INCHES * max(name.count("\n") + 1 for name in names))
    with course_style():
        figure, axes = empty_figure(height=1.9 + row_inches * len(bars))
        longest_bytes = max(bar.breakdown.total_bytes for bar in bars)
        widest_bytes = max(longest_bytes, parse_bytes(limit) if limit else 0)
        decimal = (parse_bytes(f"1{unit}"), unit) if unit else None
        unit_bytes, unit = decimal or byte_unit(widest_bytes)
        for row, bar in enumerate(bars):
            _draw_bar(axes, row, bar, unit_bytes, widest_bytes / unit_bytes)
            total = bar.breakdown.total_bytes
            text = f"{total / unit_bytes:,.1f} {unit}" if decimal else format_bytes(total)
            # On white: a card's line may pass where the number stands.
            axes.text(
                total / unit_bytes,
                row,
                f"  {text}",
                va="center",
                fontsize=11,
                zorder=3,
                bbox={"boxstyle": "square,pad=0", "facecolor": "white", "linewidth": 0},
            )
        axes.set_yticks(range(len(bars)), names)
        axes.tick_params(axis="y", length=0)  # beside a number a tick reads as a minus
        axes.invert_yaxis()
        axes.set_xlabel(f"memory ({unit})")
        axes.set_title(title, pad=20 if limit else None)  # the limit's name stands between
        axes.grid(False, axis="y")
        axes.margins(x=0.2)  # room for the longest bar's number
        _draw_limit(axes, limit, unit_bytes)
        _draw_legend(figure, bars, longest_bytes)
        print_evidence(figure, [bar.evidence for bar in bars], [bar.device for bar in bars])
    return figure


def _draw_bar(axes: Axes, row: int, bar: Bar, unit_bytes: int, widest: float) -> None:
    left = 0.0
    for category in bar.breakdown:
        width = bar.breakdown[category] / unit_bytes
        look = LOOKS[category]
        axes.barh(row, width, left=left, height=0.6, color=look.color, hatch=look.hatch)
        if text := _number_that_fits(width, widest):
            _label(axes, left + width / 2, row, text)
        left += width


def _number_that_fits(width: float, widest: float) -> str:
    """The width with one decimal, as in every bar; "" where it has no room."""
    text = f"{width:.1f}"
    return text if width > CHARACTER_WIDTH * (len(text) + 1) * widest else ""


def _draw_limit(axes: Axes, limit: str, unit_bytes: int) -> None:
    if limit:
        axes.axvline(parse_bytes(limit) / unit_bytes, color="black", linestyle="--", label=limit)
        axes.annotate(
            limit,
            (parse_bytes(limit) / unit_bytes, 1),
            xycoords=("data", "axes fraction"),
            ha="right",
            va="bottom",
            fontsize=10,
        )


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.85, "linewidth": 0}
    axes.text(x, y, text, ha="center", va="center", fontsize=10, bbox=box)


def _draw_legend(figure: Figure, bars: Sequence[Bar], longest_bytes: int) -> None:
    visible = longest_bytes * NARROWEST_VISIBLE
    present = [c for c in Category if any(bar.breakdown[c] > visible for bar in bars)]
    handles = [Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, label=str(c)) for c in present]
    figure.legend(handles=handles, loc="outside right upper")
