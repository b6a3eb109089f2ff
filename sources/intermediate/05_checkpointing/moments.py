"""The moments that may decide a checkpointed step's peak: loss, first tooth, last tooth, optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.memory.timeline import MemoryTimeline
from utils.units import Category, Phase
from utils.views.style import LOOKS, PHASE_SHADES, byte_unit, course_style, print_evidence

__all__ = ["deciding", "draw_moments", "moments"]

LOSS, FIRST, LAST, STEP = "loss peak", "first tooth", "last tooth", "optimizer step"
BESIDE = {  # where the names stand, in points, so that none covers another
    LOSS: ((-22, 34), "center"),
    FIRST: ((34, 64), "left"),
    LAST: ((12, 26), "right"),
}
ALONE = (0, 8)  # where a panel has no tooth, over its one mark
SMALLEST = 1 / 15  # of a panel's peak: less than that is no stripe on a screen


def moments(run: Measurement) -> dict[str, int]:
    """The most bytes alive around the loss, in the first and the last tooth, and in the optimizer's step.

    The loss peak is sought until a block runs again. A tooth begins where a checkpointed block runs again and ends where the next one does, or
    backward. A step in which nothing runs again has no tooth.
    """
    timeline, places = run.timeline, _places(run.timeline)
    for span in timeline.spans:
        if span.phase is Phase.OPTIMIZER_STEP:
            places[STEP] = _highest(timeline, span.start_ns, span.end_ns)
    return {name: int(timeline.alive_bytes[at]) for name, at in places.items()}


def deciding(run: Measurement) -> str:
    """The moment that decides the run's peak: the highest of its `moments`.

    Raises:
        ValueError: a run in which no such moment was seen.
    """
    found = moments(run)
    if not found:
        raise ValueError(f"{run.name or 'The run'} has no loss, no backward and no optimizer step.")
    return max(found, key=lambda name: found[name])


def _places(timeline: MemoryTimeline) -> dict[str, int]:
    """The event at which each moment is highest."""
    backward = [s for s in timeline.spans if s.phase in (Phase.BACKWARD, Phase.RECOMPUTE)]
    losses = [span.start_ns for span in timeline.spans if span.phase is Phase.LOSS]
    again = [span.start_ns for span in backward if span.phase is Phase.RECOMPUTE]
    found = {}
    if losses and backward:
        found[LOSS] = _highest(timeline, losses[0], again[0] if again else backward[-1].end_ns)
    if again:
        teeth = [_highest(timeline, *ends) for ends in pairwise([*again, backward[-1].end_ns])]
        found |= {FIRST: teeth[0], LAST: teeth[-1]}
    return found


def _highest(timeline: MemoryTimeline, start_ns: int, end_ns: int) -> int:
    first, last = np.searchsorted(timeline.times_ns, [start_ns, end_ns])
    first = max(int(first) - 1, 0)  # what is alive when it begins counts
    return first + int(timeline.alive_bytes[first : max(int(last), first + 1)].argmax())


def draw_moments(runs: Sequence[Measurement], *, title: str) -> Figure:
    """A panel for each run: all that is alive through one step, on one scale, its moments marked.

    Args:
        runs: steps of one model, each named by how it was checkpointed.
        title: with the setting.

    Raises:
        ValueError: no run.
    """
    if not runs:
        raise ValueError("draw_moments() needs a run or more.")
    highest = max(run.peak_bytes for run in runs)
    unit_bytes, unit = byte_unit(highest)
    with course_style():
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        seen: dict[Category, None] = {}
        for axes, run in zip(panels, runs, strict=True):
            seen |= dict.fromkeys(_stack(axes, run.timeline, unit_bytes))
            _shade(axes, run.timeline)
            _mark(axes, run.timeline, unit_bytes)
            axes.set_title(
                f"{run.name}: peak {run.peak_bytes / unit_bytes:.1f} {unit}", fontsize=12
            )
            axes.set_ylim(0, 1.25 * highest / unit_bytes)
            axes.set_xticks([])
            axes.set_xlabel("allocator events, not time")
        panels[0].set_ylabel(f"memory ({unit})")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        _legend(figure, list(seen))
        print_evidence(figure, [run.evidence for run in runs], [run.device for run in runs])
    return figure


def _stack(axes: Axes, timeline: MemoryTimeline, unit_bytes: int) -> Mapping[Category, None]:
    """Draw the categories on each other; those that show."""
    floor, shown = np.zeros(len(timeline.times_ns)), {}
    numbers = np.arange(len(floor))
    for category, curve in timeline.series().items():
        top = floor + curve / unit_bytes
        look = LOOKS[category]
        axes.fill_between(
            numbers,
            floor,
            top,
            step="post",
            facecolor=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0,
        )
        if curve.max() > SMALLEST * timeline.alive_bytes.max():
            shown[category] = None
        floor = top
    axes.step(numbers, floor, where="post", color="black", lw=0.8)
    axes.set_xlim(0, len(numbers))
    return shown


def _shade(axes: Axes, timeline: MemoryTimeline) -> None:
    for span in timeline.spans:
        left, right = np.searchsorted(timeline.times_ns, [span.start_ns, span.end_ns])
        axes.axvspan(left, right, color=PHASE_SHADES[span.phase], zorder=0, linewidth=0)


def _mark(axes: Axes, timeline: MemoryTimeline, unit_bytes: int) -> None:
    """The moments of backward; without any tooth the loss is the only one."""
    places = _places(timeline)
    for name, at in places.items():
        height = timeline.alive_bytes[at] / unit_bytes
        axes.plot([at], [height], "v", color="black", markersize=6, zorder=5)
        offset, side = BESIDE[name] if FIRST in places else (ALONE, "center")
        axes.annotate(
            f"{name}: {height:.1f}",
            (at, height),
            offset,
            textcoords="offset points",
            ha=side,
            fontsize=9,
            arrowprops={"arrowstyle": "-", "lw": 0.8, "shrinkB": 4} if offset != ALONE else None,
        )


def _legend(figure: Figure, categories: list[Category]) -> None:
    """Two lists: the categories from the top of the stack down, and the shades of the phases."""
    order = [category for category in reversed(Category) if category in categories]
    stripes = [
        Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, edgecolor="white", label=str(c))
        for c in order
    ]
    names = {
        Phase.FORWARD: "forward",
        Phase.RECOMPUTE: "a block runs again",
        Phase.BACKWARD: "backward",
        Phase.OPTIMIZER_STEP: "optimizer step",
    }
    shades = [
        Patch(facecolor=PHASE_SHADES[p], edgecolor="#aaaaaa", label=n) for p, n in names.items()
    ]
    lists = [_heading("alive"), *stripes, _heading(""), _heading("meanwhile"), *shades]
    figure.legend(handles=lists, loc="outside right upper", fontsize=10)


def _heading(name: str) -> Line2D:
    """A line of a legend that stands for nothing drawn."""
    return Line2D([], [], linestyle="none", label=name)


check_public(globals())
