"""The figure of lesson 01 over several batches: the highest moment of each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
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
    measurements: Sequence[Measurement], predicted_bytes: Mapping[int, float], *, title: str
) -> Figure:
    """One line a phase, against the items of a step, and a formula's totals, dashed.

    Args:
        measurements: of several batch sizes.
        predicted_bytes: by batch size.
        title: of the figure.

    Raises:
        ValueError: a step without one of the phases that `LOOKS` names.
    """
    ordered = sorted(measurements, key=lambda m: m.items)
    sizes = [m.items for m in ordered]
    with course_style():
        figure, axes = empty_figure(height=3.8)
        dashed = [predicted_bytes[size] / MIB for size in sizes]
        axes.plot(sizes, dashed, "k--", label="the formula (predicted)")
        for phase, (color, style) in LOOKS.items():
            highest = [highest_bytes(m, phase) / MIB for m in ordered]
            axes.plot(sizes, highest, style, color=color, lw=1.8, label=f"highest in {phase}")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.set_xticks(sizes)
        axes.set_xlabel(f"batch size ({ordered[0].unit})")
        axes.set_ylabel("memory (MiB)")
        axes.set_title(title)
        figure.legend(loc="outside right upper")
        kinds = [m.evidence for m in ordered] + [Evidence.PREDICTED]
        print_evidence(figure, kinds, [m.device for m in ordered])
    return figure


def _events(times_ns: np.ndarray, span: PhaseSpan) -> slice:
    """The last before a phase, and those of the phase."""
    first, after = np.searchsorted(times_ns, (span.start_ns, span.end_ns), side="right")
    return slice(max(int(first) - 1, 0), max(int(after), 1))


check_public(globals())
