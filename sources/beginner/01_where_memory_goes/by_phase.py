"""The figure of lesson 01 over several batches: the highest moment of each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.memory import Measurement
from utils.memory.timeline import PhaseSpan
from utils.units import MIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

__all__ = ["draw_by_phase", "highest_bytes"]

LOOKS = {
    "backward": ("#bd1f01", "o-"),
    "optimizer step": ("#832db6", "s-"),
    "forward": ("#3f90da", "^-"),
}


FORMULA = "max(16P + ab, 20P), predicted for foreach"


def highest_bytes(measurement: Measurement, phase: str) -> int:
    """The most that is alive at one time within a phase.

    Raises:
        ValueError: the step has no such phase.
    """
    timeline = measurement.timeline
    spans = [span for span in timeline.spans if span.name == phase]
    if not spans:
        there = ", ".join(dict.fromkeys(span.name for span in timeline.spans))
        raise ValueError(f"The step has no phase {phase!r}; it has {there}.")
    # A phase begins with what the one before left, whether or not anything happens in it.
    return max(int(timeline.alive_bytes[_events(timeline.times_ns, s)].max()) for s in spans)


def draw_by_phase(
    measurements: Sequence[Measurement],
    predicted_bytes: Mapping[int | float, float],
    apart_bytes: Mapping[str, Mapping[int, int]],
    *,
    title: str,
) -> Figure:
    """One line a phase, against the items of a step, and a formula's totals, dashed.

    Args:
        measurements: of several batch sizes.
        predicted_bytes: by batch size, in order; also between those that were measured.
        apart_bytes: by name and batch size, what was measured at some of them; dotted between.
        title: of the figure.

    Raises:
        ValueError: a step without one of the phases that `LOOKS` names.
    """
    ordered = sorted(measurements, key=lambda m: m.items)
    sizes = [m.items for m in ordered]
    lines = {FORMULA: [size_bytes / MIB for size_bytes in predicted_bytes.values()]}
    places: dict[str, list[int | float]] = {FORMULA: list(predicted_bytes)}
    for phase in LOOKS:
        lines[phase] = [highest_bytes(m, phase) / MIB for m in ordered]
    for name, measured in apart_bytes.items():
        lines[name] = [size_bytes / MIB for size_bytes in measured.values()]
        places[name] = list(measured)
    with course_style():
        figure, axes = empty_figure(height=4.2)
        for name, heights in lines.items():
            color, style = LOOKS.get(
                name, ("#832db6", "D:") if name in apart_bytes else ("k", "--")
            )
            axes.plot(places.get(name, sizes), heights, style, color=color, lw=1.8)
        lowest, highest = min(map(min, lines.values())), max(map(max, lines.values()))
        axes.set_ylim(lowest - 0.1 * (highest - lowest), highest + 0.1 * (highest - lowest))
        axes.set_xlim(0.8 * sizes[0], 1.55 * sizes[-1])
        _name_lines(axes, sizes[-1], lines)
        axes.set_xticks(sizes)
        axes.set_xlabel(f"batch size ({ordered[0].unit})")
        axes.set_ylabel("memory (MiB), not from 0")
        axes.set_title(title)
        kinds = [m.evidence for m in ordered] + [Evidence.PREDICTED]
        print_evidence(figure, kinds, [m.device for m in ordered])
    return figure


def _name_lines(axes: Axes, last: int, lines: Mapping[str, Sequence[float]]) -> None:
    """Each line's name and last height at its end, pushed up where two would touch."""
    bottom, top = axes.get_ylim()
    room, floor = 0.065 * (top - bottom), bottom
    for name, heights in sorted(lines.items(), key=lambda pair: pair[1][-1]):
        place = max(heights[-1], floor + room)
        axes.text(1.04 * last, place, f"{heights[-1]:.0f}  {name}", va="center", fontsize=10)
        floor = place


def _events(times_ns: np.ndarray, span: PhaseSpan) -> slice:
    """The last before a phase, and those of the phase."""
    first, after = np.searchsorted(times_ns, (span.start_ns, span.end_ns), side="right")
    return slice(max(int(first) - 1, 0), max(int(after), 1))


check_public(globals())
