"""The figure of lesson 01's loops: activations over several batches, each batch and phase named."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.memory import Measurement
from utils.memory.timeline import MemoryTimeline, PhaseSpan
from utils.units import Phase
from utils.views import draw_over_time
from utils.views.style import course_style

__all__ = ["draw_batches"]

NAMED = (Phase.FORWARD, Phase.BACKWARD)


def draw_batches(runs: Mapping[str, Measurement], category: str, *, title: str) -> Figure:
    """A panel a run: a category's bytes, with a line where each batch begins.

    Args:
        runs: by name; each has one forward a batch.
        category: such as "activations".
        title: of the figure.
    """
    with course_style():
        figure = draw_over_time(runs, category, title=title)
        for axes, run in zip(figure.axes, runs.values(), strict=True):
            for text in list(axes.texts):
                text.remove()
            _name_batches(axes, run.timeline)
            if any(span.phase is Phase.BACKWARD for span in run.timeline.spans):
                _name_phases(axes, run.timeline)
    return figure


def _place(timeline: MemoryTimeline, time_ns: int) -> int:
    """Of which event a time is, as `draw_over_time` counts them."""
    return int(np.searchsorted(timeline.times_ns, time_ns))


def _write(axes: Axes, x: float, y: float, text: str, rotation: int = 0) -> None:
    place = axes.get_xaxis_transform()
    axes.text(x, y, text, transform=place, ha="center", va="top", rotation=rotation, fontsize=9)


def _name_batches(axes: Axes, timeline: MemoryTimeline) -> None:
    begins = [_place(timeline, s.start_ns) for s in timeline.spans if s.phase is Phase.FORWARD]
    ends = [*begins[1:], len(timeline.times_ns)]
    for number, (left, right) in enumerate(zip(begins, ends, strict=True), 1):
        if number > 1:
            axes.axvline(left, color="#444444", linestyle=":", linewidth=1)
        _write(axes, (left + right) / 2, 0.985, f"batch {number}")


def _name_phases(axes: Axes, timeline: MemoryTimeline) -> None:
    spans: list[PhaseSpan] = [span for span in timeline.spans if span.phase in NAMED]
    for span in spans:
        middle = (_place(timeline, span.start_ns) + _place(timeline, span.end_ns)) / 2
        _write(axes, middle, 0.7, span.name, rotation=90)


check_public(globals())
