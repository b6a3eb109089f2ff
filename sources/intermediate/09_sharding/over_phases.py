"""Gradients through the phases of a step, on several ranks; and gathers beside the work they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.units import Category, Evidence, Phase
from utils.views.style import LOOKS, PHASE_SHADES, course_style, print_evidence

REDUCE, STEP = "reduce", "copy and step"  # names that the lesson gives with `phase`
PHASES = (REDUCE, STEP)
_BANDS = {"forward": 1.0, "backward": 2.0, REDUCE: 1.2, "step": 1.2}  # and how wide each is drawn
_SHADES = {
    "forward": PHASE_SHADES[Phase.FORWARD],
    "backward": PHASE_SHADES[Phase.BACKWARD],
    REDUCE: "#efefef",
    "step": PHASE_SHADES[Phase.OPTIMIZER_STEP],
}
_BAND_OF = {
    str(Phase.BACKWARD): "backward",
    str(Phase.RECOMPUTE): "backward",
    REDUCE: REDUCE,
    STEP: "step",
    str(Phase.OPTIMIZER_STEP): "step",
    str(Phase.AFTER_STEP): "step",
}
_MS = 1000


def draw_gradients(
    runs: Mapping[str, Mapping[int, Measurement]], *, per: int, title: str = ""
) -> Figure:
    """A column for each scheme, a row for each rank: gradients in bytes per parameter.

    Each phase has a width of its own; within it stand allocator events, in order, and in the step,
    whose other events are many, changes of the gradients.

    Args:
        runs: by scheme, a step's measurement by rank; the same ranks in each.
        per: parameters.

    Raises:
        ValueError: nothing to draw.
    """
    ranks = sorted({rank for found in runs.values() for rank in found})
    if not ranks:
        raise ValueError("draw_gradients() needs the measurement of one rank or more.")
    curves = {(n, r): _placed(run) for n, found in runs.items() for r, run in found.items()}
    highest = max(sizes.max() for _, sizes in curves.values()) / per
    with course_style():
        size = (2.7 * len(runs) + 0.8, 1.7 * len(ranks) + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(ranks), len(runs), squeeze=False, sharex=True, sharey=True)
        for column, name in enumerate(runs):
            panels[0][column].set_title(name, fontsize=12)
            for row, rank in enumerate(ranks):
                axes = panels[row][column]
                _shade(axes, named=row == 0)
                places, sizes = curves[name, rank]
                look = LOOKS[Category.GRADIENTS]
                axes.fill_between(
                    places, 0, sizes / per, step="post", color=look.color, hatch=look.hatch, lw=0
                )
                axes.set(xlim=(0, sum(_BANDS.values())), ylim=(0, 1.3 * highest), xticks=[])
        for axes in panels[-1]:
            axes.set_xlabel("events, in order", fontsize=9)
        for row, rank in enumerate(ranks):
            panels[row][0].set_ylabel(f"rank {rank}\nbytes/parameter")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        shown = [run for found in runs.values() for run in found.values()]
        print_evidence(figure, [m.evidence for m in shown], [m.device for m in shown])
    return figure


def _placed(run: Measurement) -> tuple[np.ndarray, np.ndarray]:
    """Where each event stands on the axis of phases, and the gradients after it."""
    times = np.asarray(run.timeline.times_ns)
    names, order = list(_BANDS), np.zeros(len(times), dtype=int)
    for span in run.timeline.spans:
        inside = (times >= span.start_ns) & (times < span.end_ns)
        order[inside] = names.index(_BAND_OF.get(span.name, "forward"))
    order = np.maximum.accumulate(order)  # a phase that is over does not come again
    starts = np.cumsum([0.0, *_BANDS.values()])
    series = run.timeline.series().get(Category.GRADIENTS, np.zeros(len(times)))
    changes, places = np.diff(series, prepend=series[:1]) != 0, np.zeros(len(times))
    for band, width in enumerate(_BANDS.values()):
        mine = np.flatnonzero(order == band)
        counted = changes if band == len(_BANDS) - 1 else np.ones(len(times))
        count = np.cumsum(counted[mine])
        places[mine] = starts[band] + width * count / (1 + max(count, default=0))
    return np.append(places, starts[-1]), np.append(series, series[-1:])


def _shade(axes: Axes, named: bool) -> None:
    left = 0.0
    for name, width in _BANDS.items():
        axes.axvspan(left, left + width, color=_SHADES[name], zorder=0, lw=0)
        if named:
            axes.text(
                left + width / 2,
                0.97,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8.5,
                color="#333333",
            )
        left += width


def draw_overlap(
    seconds: Mapping[str, tuple[float, float]], *, blocks: int = 4, title: str = ""
) -> Figure:
    """A panel for each case: blocks are gathered one ahead of the work on them, in forward.

    Args:
        seconds: to gather one block, and of its forward, by what the panel is called.
        blocks: of the forward that is drawn.
    """
    with course_style():
        figure = Figure(figsize=(9, 1.25 * len(seconds) + 1.2), layout="constrained")
        panels = figure.subplots(len(seconds), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (name, (gathering, compute)) in zip(panels, seconds.items(), strict=True):
            gathers, works = one_ahead(gathering, compute, blocks)
            for block, (gather, work) in enumerate(zip(gathers, works, strict=True)):
                for row, start, length, color, hatch in (
                    (1, gather, gathering, "#92dadd", "//"),
                    (0, work, compute, "#ffa90e", ""),
                ):
                    axes.barh(
                        row, _MS * length, left=_MS * start, color=color, hatch=hatch, ec="white"
                    )
                    box = {"facecolor": "white", "lw": 0, "boxstyle": "round,pad=0.1"}
                    centre = _MS * (start + length / 2)
                    axes.text(
                        centre, row, str(block), ha="center", va="center", fontsize=9, bbox=box
                    )
            axes.set_yticks([0, 1], ["compute block", "gather block"])
            axes.set_title(name, fontsize=11)
            axes.grid(False, axis="y")
        panels[-1].set_xlabel("milliseconds of forward")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def one_ahead(
    gather_seconds: float, compute_seconds: float, blocks: int
) -> tuple[Sequence[float], Sequence[float]]:
    """When each block's gather starts, and its work: a gather starts with the work on the block before."""
    gathers, works = [0.0], [gather_seconds]
    for _ in range(blocks - 1):
        gathers.append(max(works[-1], gathers[-1] + gather_seconds))
        works.append(max(gathers[-1] + gather_seconds, works[-1] + compute_seconds))
    return gathers, works


__all__ = ["PHASES", "draw_gradients", "draw_overlap", "one_ahead"]

check_public(globals())
