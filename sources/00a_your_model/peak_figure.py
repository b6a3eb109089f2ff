"""One step's memory twice: as a whole, and the events around its peak, each large one with its size."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.fitting.verdict import FitVerdict
from utils.memory.timeline import MemoryTimeline
from utils.units import GIB
from utils.views.style import LOOKS, PHASE_SHADES, course_style, print_evidence

BEFORE, AFTER = 20, 14  # allocator events on each side of the peak
LARGE_SHARE = 0.05  # of the peak: a rise above it gets its size
MOST_POINTS = 2000
VISIBLE_SHARE = 1 / 400
NAMED_SHARE = 0.06  # of the step: a shorter phase gets no name


def draw_step(verdict: FitVerdict, title: str, memory_bytes: int) -> Figure:
    """The step's memory by category, and beside it the moments around the peak.

    Args:
        verdict: Of the step; its usable bytes are drawn as the limit.
        title: Of both panels.
        memory_bytes: What the card has in all.
    """
    timeline = verdict.measurement.timeline
    with course_style():
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        whole, near = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_whole(whole, timeline)
        _draw_near(near, timeline)
        for axes in (whole, near):
            axes.axhline(verdict.usable_bytes / GIB, color="black", linestyle="--", linewidth=1.5)
        whole.set_ylabel("memory of tensors (GiB)")
        room = f"room: {verdict.usable_bytes / GIB:.2f} of {memory_bytes / GIB:.2f} GiB"
        whole.text(0.99, verdict.usable_bytes / GIB, room, ha="right", va="bottom", fontsize=10,
                   bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
                   transform=whole.get_yaxis_transform())  # fmt: skip
        handles, labels = near.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        figure.suptitle(title, fontsize=12)
        print_evidence(figure, [verdict.measurement.evidence], [verdict.measurement.device])
    return figure


def _draw_whole(axes: Axes, timeline: MemoryTimeline) -> None:
    count = len(timeline.times_ns)
    parts = np.array_split(np.arange(count), min(count, MOST_POINTS))
    _stack(axes, timeline, np.array([part[timeline.alive_bytes[part].argmax()] for part in parts]))
    length_ns = timeline.end_ns - timeline.start_ns
    for span in timeline.spans:
        left, right = span.start_ns - timeline.start_ns, span.end_ns - timeline.start_ns
        axes.axvspan(left, right, color=PHASE_SHADES[span.phase], zorder=0, linewidth=0)
        if right - left > NAMED_SHARE * length_ns:
            axes.text((left + right) / 2, 0.93, span.name, ha="center", fontsize=10, color="#444444",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set(xlim=(0, length_ns), ylim=(0, 1.2 * timeline.peak_bytes / GIB))
    axes.set_xlabel("allocator events of the step, in order")
    axes.set_title("the whole step", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def _draw_near(axes: Axes, timeline: MemoryTimeline) -> None:
    peak = int(timeline.alive_bytes.argmax())
    first, last = max(0, peak - BEFORE), min(len(timeline.times_ns) - 1, peak + AFTER)
    _stack(axes, timeline, np.arange(first, last + 1))
    alive = timeline.alive_bytes / GIB
    for index in range(first + 1, last + 1):
        rise = alive[index] - alive[index - 1]
        if rise > LARGE_SHARE * alive[peak]:
            x = timeline.times_ns[index] - timeline.start_ns
            axes.text(x, alive[index], f"+{rise:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, 1.2 * alive[peak])
    axes.set_xlim(*(timeline.times_ns[[first, last]] - timeline.start_ns))
    axes.set_xlabel("the events around the peak")
    axes.set_title(f"peak: {alive[peak]:.2f} GiB, in {timeline.peak_phase}", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def _stack(axes: Axes, timeline: MemoryTimeline, keep: np.ndarray) -> None:
    x = timeline.times_ns[keep] - timeline.start_ns
    floor = np.zeros(len(keep))
    for category, curve in timeline.series().items():
        top = floor + curve[keep] / GIB
        look, most = LOOKS[category], curve[keep].max()
        name = str(category) if most > VISIBLE_SHARE * timeline.peak_bytes else ""
        axes.fill_between(x, floor, top, step="post", label=name, facecolor=look.color,
                          hatch=look.hatch, edgecolor="white", linewidth=0)  # fmt: skip
        floor = top
    axes.step(x, timeline.alive_bytes[keep] / GIB, where="post", color="black", linewidth=1)
