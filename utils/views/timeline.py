"""The timeline of one step: categories stacked, phases shaded, the peak marked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.memory.measurement import Measurement
from utils.memory.timeline import MemoryTimeline, PhaseSpan
from utils.units import Evidence, Phase, format_bytes, parse_bytes
from utils.views.breakdown import NARROWEST_VISIBLE
from utils.views.style import (
    LOOKS,
    PHASE_SHADES,
    byte_unit,
    course_style,
    empty_figure,
    print_evidence,
)

MOST_POINTS = 1500
NARROWEST_NAMED = 0.05  # of the width: a narrower phase gets no name
CHARACTER_WIDTH = 0.0125  # of the width, in a phase's name
WITH_RECOMPUTE = "backward with recompute"

_PHASE_NAMES = {*map(str, Phase), WITH_RECOMPUTE}
_BACKWARD = {str(Phase.BACKWARD), str(Phase.RECOMPUTE), WITH_RECOMPUTE}


def draw_timeline(measurement: Measurement, *, title: str = "", limit: str = "") -> Figure:
    """Stacked memory by category over the time of one step; `limit` ("16GB") draws a card's memory.

    Raises:
        ValueError: `limit` is no size.
    """
    timeline = measurement.timeline
    highest_bytes = max(timeline.peak_bytes, parse_bytes(limit) if limit else 0)
    unit_bytes, unit = byte_unit(highest_bytes)
    with course_style():
        figure, axes = empty_figure()
        _shade_phases(axes, timeline)
        _name_phases(axes, timeline)
        _stack_categories(axes, timeline, unit_bytes)
        _mark_peak(axes, timeline, unit_bytes)
        axes.set_xlim(0, _ms(timeline, timeline.end_ns))
        axes.set_ylim(0, highest_bytes / unit_bytes * 1.22)
        _draw_limit(axes, limit, unit_bytes)
        _label_time(axes, measurement.evidence)
        axes.set_ylabel(f"memory ({unit})")
        axes.set_title(title or f"{measurement.name}: one step", pad=22)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        print_evidence(figure, [measurement.evidence], [measurement.device])
    return figure


def _draw_limit(axes: Axes, limit: str, unit_bytes: int) -> None:
    if limit:
        height = parse_bytes(limit) / unit_bytes
        axes.axhline(height, color="black", linestyle="--", linewidth=1.5)
        axes.annotate(
            f"the card: {limit}",
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=10,
        )


def _label_time(axes: Axes, evidence: Evidence) -> None:
    """A simulated step has no duration: its clock counts the allocator's events."""
    if evidence is Evidence.SIMULATED:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x * 1e6:,.0f}")
        axes.set_xlabel("allocator events in the simulated step, in order")
    else:
        axes.set_xlabel("time in the metered step (ms)")


def _ms(timeline: MemoryTimeline, time_ns: int) -> float:
    return (time_ns - timeline.start_ns) / 1e6


def _shade_phases(axes: Axes, timeline: MemoryTimeline) -> None:
    for span in timeline.spans:
        left, right = _ms(timeline, span.start_ns), _ms(timeline, span.end_ns)
        axes.axvspan(left, right, color=PHASE_SHADES[span.phase], zorder=0, linewidth=0)


class _Label(NamedTuple):
    """A phase's name and the place it takes, in fractions of the axes."""

    name: str
    height: float
    left: float
    right: float

    def collides(self, other: _Label) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return self.height == other.height and not apart


def _name_phases(axes: Axes, timeline: MemoryTimeline) -> None:
    """The phases' names above the axes, and below their edge those that were given by hand."""
    placed: list[_Label] = []
    for span in sorted(_stretches(timeline), key=lambda s: s.start_ns - s.end_ns):  # long ones win
        label = _label(span, timeline)
        if label is not None and not any(map(label.collides, placed)):
            placed.append(label)
    for label in placed:
        axes.annotate(
            label.name,
            ((label.left + label.right) / 2, label.height),
            xycoords="axes fraction",
            ha="center",
            va="bottom",
            fontsize=10,
            color="#444444",
        )


def _label(span: PhaseSpan, timeline: MemoryTimeline) -> _Label | None:
    """Where the span's name goes; None if the span is too narrow and its name the meter's own."""
    whole_ns = max(timeline.end_ns - timeline.start_ns, 1)
    by_hand = span.name not in _PHASE_NAMES
    if not by_hand and span.end_ns - span.start_ns < NARROWEST_NAMED * whole_ns:
        return None
    half = CHARACTER_WIDTH * len(span.name) / 2
    middle = ((span.start_ns + span.end_ns) / 2 - timeline.start_ns) / whole_ns
    middle = max(half, min(middle, 1 - half))
    return _Label(span.name, 0.95 if by_hand else 1.01, middle - half, middle + half)


def _stretches(timeline: MemoryTimeline) -> list[PhaseSpan]:
    """The phases to name. Recomputation cuts backward into slices: they get one name together."""
    joined: list[PhaseSpan] = []
    for span in timeline.spans:
        if span.name in _BACKWARD and joined and joined[-1].name in _BACKWARD:
            span = span._replace(name=WITH_RECOMPUTE, start_ns=joined.pop().start_ns)
        joined.append(span)
    return joined


def _stack_categories(axes: Axes, timeline: MemoryTimeline, unit_bytes: int) -> None:
    keep = _points(timeline)
    keep = np.append(keep, keep[-1])  # what is alive after the last event stays until the end
    times_ns = np.append(timeline.times_ns[keep[:-1]], timeline.end_ns)
    times_ms = (times_ns - timeline.start_ns) / 1e6
    floor = np.zeros(len(keep))
    for category, curve in timeline.series().items():
        top = floor + curve[keep] / unit_bytes
        visible = curve.max() >= timeline.peak_bytes * NARROWEST_VISIBLE
        look = LOOKS[category]
        axes.fill_between(
            times_ms,
            floor,
            top,
            step="post",
            label=str(category) if visible else "",
            facecolor=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0,
        )
        floor = top
    axes.step(times_ms, timeline.alive_bytes[keep] / unit_bytes, where="post", color="black", lw=1)


def _points(timeline: MemoryTimeline) -> np.ndarray:
    """Indices to draw: all, or for long steps the highest event of each slice of the time."""
    count = len(timeline.times_ns)
    if count <= MOST_POINTS:
        return np.arange(count)
    slices = np.array_split(np.arange(count), MOST_POINTS)
    highest = [part[timeline.alive_bytes[part].argmax()] for part in slices]
    return np.unique([0, *highest, count - 1])


def _mark_peak(axes: Axes, timeline: MemoryTimeline, unit_bytes: int) -> None:
    x, y = _ms(timeline, timeline.peak_ns), timeline.peak_bytes / unit_bytes
    text = f"peak {format_bytes(timeline.peak_bytes)} in {timeline.peak_phase}"
    side = "right" if x > _ms(timeline, timeline.end_ns) / 2 else "left"
    axes.plot([x], [y], "v", color="black", markersize=9, zorder=5)
    axes.annotate(
        text,
        (x, y),
        xytext=(0, 9),
        textcoords="offset points",
        ha=side,
        fontsize=11,
        fontweight="bold",
    )
