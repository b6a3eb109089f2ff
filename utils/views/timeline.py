"""The timeline of one step: categories stacked, phases shaded, the peak marked."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.memory.events import Category
from utils.memory.measurement import Measurement
from utils.memory.timeline import MemoryTimeline
from utils.units import format_bytes
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
NARROWEST_NAMED = 0.05  # of the width: a narrower phase gets no room for its name


def draw_timeline(measurement: Measurement, *, title: str = "") -> Figure:
    """Stacked memory by category over the time of one step."""
    timeline = measurement.timeline
    unit_bytes, unit = byte_unit(timeline.peak_bytes)
    with course_style():
        figure, axes = empty_figure()
        _shade_phases(axes, timeline)
        _stack_categories(axes, timeline, unit_bytes)
        _mark_peak(axes, timeline, unit_bytes)
        axes.set_xlim(0, _ms(timeline, timeline.end_ns))
        axes.set_ylim(0, timeline.peak_bytes / unit_bytes * 1.22)
        axes.set_xlabel("time in the metered step (ms)")
        axes.set_ylabel(f"memory ({unit})")
        axes.set_title(title or f"{measurement.name}: one step", pad=22)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        print_evidence(figure, [measurement.evidence], measurement.device)
    return figure


def _ms(timeline: MemoryTimeline, time_ns: int) -> float:
    return (time_ns - timeline.start_ns) / 1e6


def _shade_phases(axes: Axes, timeline: MemoryTimeline) -> None:
    whole_ms = _ms(timeline, timeline.end_ns)
    for span in timeline.spans:
        left, right = _ms(timeline, span.start_ns), _ms(timeline, span.end_ns)
        axes.axvspan(left, right, color=PHASE_SHADES[span.phase], zorder=0, linewidth=0)
        if right - left > NARROWEST_NAMED * whole_ms:
            axes.annotate(
                span.name, ((left + right) / 2, 1.01), xycoords=("data", "axes fraction"),
                ha="center", va="bottom", fontsize=10, color="#444444",
            )  # fmt: skip


def _stack_categories(axes: Axes, timeline: MemoryTimeline, unit_bytes: int) -> None:
    keep = _points(timeline)
    times_ms = (timeline.times_ns[keep] - timeline.start_ns) / 1e6
    floor = np.zeros(len(keep))
    series = timeline.series()
    for category in Category:
        curve = series.get(category)
        if curve is None or curve.max() < timeline.peak_bytes * NARROWEST_VISIBLE:
            continue
        top = floor + curve[keep] / unit_bytes
        look = LOOKS[category]
        axes.fill_between(
            times_ms, floor, top, step="post", label=str(category), facecolor=look.color,
            hatch=look.hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
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
        text, (x, y), xytext=(0, 9), textcoords="offset points", ha=side, fontsize=11,
        fontweight="bold",
    )  # fmt: skip
