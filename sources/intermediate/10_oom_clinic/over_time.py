"""Figures of what is alive over a run's steps, and of what is reserved for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.clinic import Examination
from utils.units import MIB, Evidence
from utils.views.style import LOOKS, course_style, empty_figure, print_evidence

from .looks import EDGE, SICK, WELL, draw_limit
from .steps import Step, step_ends

_LEAST_STRETCH = 0.4  # of the axis, for what comes after the last step
_NARROWEST_NAME = 0.0092  # of the axis, for a character
_WIDTH_POWER = 0.3  # a phase of n events is as wide as n to this power


def draw_alive(runs: Mapping[str, Examination], *, title: str, after_last: str = "") -> Figure:
    """What is alive through whole runs, a panel each: lines end the steps, a dashed one is the budget.

    Args:
        runs: by the title of their panel.
        after_last: what comes after the last step, written there.

    Raises:
        ValueError: no run.
    """
    if not runs:
        raise ValueError("draw_alive() needs a run or more.")
    with course_style():
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, (name, found) in zip(panels, runs.items(), strict=True):
            alive_in(axes, found, after_last)
            axes.set_title(name, fontsize=12)
        panels[0].set_ylabel("alive (MiB)")
        panels[0].set_ylim(0, 1.2 * max(f.run.peak_bytes for f in runs.values()) / MIB)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def alive_in(axes, found: Examination, after_last: str = "") -> None:
    """All bytes alive after each allocator event, with the ends of steps."""
    timeline = found.run.timeline
    curve = timeline.alive_bytes / MIB
    ends = np.searchsorted(timeline.times_ns, step_ends(found), side="right")
    names = [str(number) for number in range(1, len(ends) + 1)]
    if after_last:
        ends, names = np.append(ends, len(curve)), [*names, after_last]
    starts = np.concatenate([[0], ends[:-1]])
    places = _places(len(curve), int(starts[-1])) if after_last else np.arange(len(curve) + 1.0)
    axes.fill_between(places[:-1], 0, curve, step="post", color=WELL, linewidth=0)
    for end in ends[:-1]:
        axes.axvline(places[end], color=EDGE, linewidth=0.6)
    peaks = [
        first + int(curve[first:end].argmax()) for first, end in zip(starts, ends, strict=True)
    ]
    axes.plot(places[peaks], curve[peaks], "v", color="black", markersize=4, zorder=3)
    _name_highest(axes, places, curve)
    axes.set_xticks((places[starts] + places[ends]) / 2, names)
    axes.set_xlim(0, places[-1])
    axes.set_ylim(0, 1.25 * max(curve.max(), found.patient.limit_bytes / MIB))
    axes.set_xlabel("step, by allocator events; \N{BLACK DOWN-POINTING TRIANGLE} its peak")
    axes.grid(False, axis="x")
    draw_limit(axes, found.patient.limit_bytes)


def _places(count: int, last: int) -> np.ndarray:
    """Where events stand, and the end: those from `last` on take a share of the axis at least."""
    places = np.arange(count + 1.0)
    wanted = last * _LEAST_STRETCH / (1 - _LEAST_STRETCH)
    factor = max(1.0, wanted / max(count - last, 1))
    return np.where(places > last, last + (places - last) * factor, places)


def _name_highest(axes, places: np.ndarray, curve: np.ndarray) -> None:
    """The number of the highest peak, which decides."""
    at = int(curve.argmax())
    axes.annotate(
        f"{curve[at]:.1f} MiB",
        (places[at], curve[at]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right" if places[at] > 0.85 * places[-1] else "center",
        fontsize=9,
    )


def draw_stacked(found: Examination, *, title: str, steps: int = 2) -> Figure:
    """What is alive by category through a run's first steps, its phases named, against the budget."""
    timeline = found.run.timeline
    last = int(np.searchsorted(timeline.times_ns, step_ends(found)[steps - 1], side="right"))
    phases = _phases(found, last)
    places = _by_phase(phases, last)
    with course_style():
        figure, axes = empty_figure(height=4.2)
        floor = np.zeros(last)
        for category, curve in timeline.series().items():
            look, top = LOOKS[category], floor + curve[:last] / MIB
            axes.fill_between(
                places[:-1],
                floor,
                top,
                step="post",
                label=str(category) if curve.max() > timeline.peak_bytes / 100 else "",
                facecolor=look.color,
                hatch=look.hatch,
                edgecolor="white",
                linewidth=0,
            )
            floor = top
        _name_phases(axes, phases, places)
        at = int(floor.argmax())
        axes.plot(places[at], floor[at], "v", color="black", markersize=6, zorder=3)
        _name_highest(axes, places, floor)
        axes.set_xlim(0, places[-1])
        axes.set_xticks([])
        axes.set_ylim(0, 1.2 * max(floor.max(), found.patient.limit_bytes / MIB))
        axes.set_xlabel("allocator events, in order; short phases drawn wider")
        axes.set_ylabel("alive (MiB)")
        axes.set_title(title, pad=22)
        draw_limit(axes, found.patient.limit_bytes)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _phases(found: Examination, last: int) -> list[tuple[str, int, int]]:
    """Each phase with its first event and the one behind its last, as far as those are drawn."""
    timeline, found_phases = found.run.timeline, []
    for span in timeline.spans:
        edges = np.searchsorted(timeline.times_ns, (span.start_ns, span.end_ns))
        left, right = (min(int(index), last) for index in edges)
        found_phases += [(span.name, left, right)] if right > left else []
    return found_phases


def _by_phase(phases: Sequence[tuple[str, int, int]], last: int) -> np.ndarray:
    """Where events stand, and the end: a phase of few events is wider than their share."""
    widths = np.ones(last)
    for _, left, right in phases:
        widths[left:right] = (right - left) ** (_WIDTH_POWER - 1)
    return np.concatenate([[0.0], np.cumsum(widths)])


def _name_phases(axes, phases: Sequence[tuple[str, int, int]], places: np.ndarray) -> None:
    """A line where a phase begins, and its name above where there is room for it."""
    for name, left, right in phases:
        start, end = places[left], places[right]
        axes.axvline(start, color=EDGE, linewidth=0.6)
        if end - start > _NARROWEST_NAME * len(name) * places[-1]:
            axes.annotate(
                name,
                ((start + end) / 2, 1.01),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                fontsize=8,
            )


def draw_steps(
    runs: Mapping[str, Sequence[Step]],
    names: Mapping[str, Sequence[str]],
    *,
    limit_bytes: int,
    title: str,
) -> Figure:
    """Each step's peak as a bar, and what is reserved from then on as a line; a panel a run.

    Args:
        runs: steps by the title of their panel.
        names: of each run's steps.
        limit_bytes: the budget, a dashed line.
        title: of the figure.

    Raises:
        ValueError: no run.
    """
    if not runs:
        raise ValueError("draw_steps() needs a run or more.")
    with course_style():
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, (name, steps) in zip(panels, runs.items(), strict=True):
            places = range(len(steps))
            peaks = [step.peak_bytes / MIB for step in steps]
            axes.bar(places, peaks, color=WELL, label="peak alive in the step (measured)")
            reserved = [step.reserved_bytes / MIB for step in steps]
            axes.step(
                [
                    place - 0.5 for place in (*places, len(steps))
                ],  # a step's bar lies below its line
                [*reserved, reserved[-1]],
                where="post",
                color=SICK,
                linewidth=2,
                label="reserved by its end (simulated)",
            )
            axes.set_xticks(places, names[name], fontsize=9)
            axes.set_xlabel("tokens of the step's texts")
            axes.grid(False, axis="x")
            axes.set_title(name, fontsize=12)
        most = max(step.reserved_bytes for steps in runs.values() for step in steps)
        most_steps = max(map(len, runs.values()))
        panels[0].set_ylim(0, 1.1 * max(most, limit_bytes) / MIB)
        for axes in panels:
            draw_limit(axes, limit_bytes)
            axes.set_xlim(-0.6, most_steps - 0.3)
        panels[0].set_ylabel("memory (MiB)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED, Evidence.SIMULATED])
    return figure


__all__ = ["alive_in", "draw_alive", "draw_stacked", "draw_steps"]

check_public(globals())
