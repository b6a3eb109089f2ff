"""Gradients through the phases of a step, on several ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.units import Category, Phase
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
_KEPT = LOOKS[Category.GRADIENTS]
_BUCKET = (LOOKS[Category.COMMUNICATION].color, LOOKS[Category.COMMUNICATION].hatch)


def draw_gradients(
    runs: Mapping[str, Mapping[int, Measurement]],
    *,
    per: int,
    title: str = "",
    reduces: Collection[str] = (),
    buckets: Collection[str] = (),
) -> Figure:
    """A column for each scheme, a row for each rank: gradients in bytes per parameter.

    Each phase has a width of its own; within it stand allocator events, in order, and in the step,
    whose other events are many, changes of the gradients.

    Args:
        runs: by scheme, a step's measurement by rank; the same ranks in each.
        per: parameters.
        reduces: schemes that reduce when backward is over, and so have a phase for it.
        buckets: schemes whose buckets are drawn on top of the gradients.

    Raises:
        ValueError: nothing to draw.
    """
    ranks = sorted({rank for found in runs.values() for rank in found})
    if not ranks:
        raise ValueError("draw_gradients() needs the measurement of one rank or more.")
    bands = {name: _bands(name in reduces) for name in runs}
    curves = {
        (n, r): _placed(run, bands[n], n in buckets)
        for n, found in runs.items()
        for r, run in found.items()
    }
    highest = max(sums.max() for _, _, sums in curves.values()) / per
    with course_style():
        size = (2.7 * len(runs) + 0.8, 1.9 * len(ranks) + 1.1)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(ranks), len(runs), squeeze=False, sharex=True, sharey=True)
        for column, name in enumerate(runs):
            panels[0][column].set_title(name, fontsize=12)
            for row, rank in enumerate(ranks):
                axes = panels[row][column]
                _shade(axes, bands[name], named=row == 0)
                places, sizes, sums = curves[name, rank]
                for low, high, (color, hatch) in (
                    (np.zeros_like(sizes), sizes, _KEPT),
                    (sizes, sums, _BUCKET),
                ):
                    axes.fill_between(
                        places, low / per, high / per, step="post", fc=color, hatch=hatch, ec="white", lw=0
                    )  # fmt: skip
                axes.set(xlim=(0, sum(_BANDS.values())), ylim=(0, 1.3 * highest), xticks=[])
        for axes in panels[-1]:
            axes.set_xlabel("events, in order", fontsize=9)
        for row, rank in enumerate(ranks):
            panels[row][0].set_ylabel(f"rank {rank}\nbytes/parameter")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        if buckets:
            handles = [Patch(facecolor=c, hatch=h, edgecolor="white") for c, h in (_KEPT, _BUCKET)]
            names = ("gradients", "bucket (send buffer)")
            figure.legend(handles, names, loc="outside upper right", ncols=2, fontsize=10)
        shown = [run for found in runs.values() for run in found.values()]
        print_evidence(figure, [m.evidence for m in shown], [m.device for m in shown])
    return figure


def _bands(reduces: bool) -> dict[str, float]:
    """How wide each phase is drawn; one that reduces inside of backward has no phase for it."""
    if reduces:
        return _BANDS
    wider = {"backward": _BANDS["backward"] + _BANDS[REDUCE]}
    return {name: width for name, width in (_BANDS | wider).items() if name != REDUCE}


def _placed(
    run: Measurement, bands: Mapping[str, float], buckets: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each event stands on the axis of phases; the gradients after it, and these with buckets."""
    times = np.asarray(run.timeline.times_ns)
    names, order = list(bands), np.zeros(len(times), dtype=int)
    for span in run.timeline.spans:
        inside = (times >= span.start_ns) & (times < span.end_ns)
        band = _BAND_OF.get(span.name, "forward")
        order[inside] = names.index(band if band in bands else "backward")
    order = np.maximum.accumulate(order)  # a phase that is over does not come again
    starts = np.cumsum([0.0, *bands.values()])
    found, none = run.timeline.series(), np.zeros(len(times))
    series = found.get(Category.GRADIENTS, none)
    sums = series + (found.get(Category.COMMUNICATION, none) if buckets else none)
    changes, places = np.diff(series, prepend=series[:1]) != 0, np.zeros(len(times))
    for band, width in enumerate(bands.values()):
        mine = np.flatnonzero(order == band)
        counted = changes if band == len(bands) - 1 else np.ones(len(times))
        count = np.cumsum(counted[mine])
        places[mine] = starts[band] + width * count / (1 + max(count, default=0))
    ends = np.append(places, starts[-1])
    return ends, np.append(series, series[-1:]), np.append(sums, sums[-1:])


def _shade(axes: Axes, bands: Mapping[str, float], named: bool) -> None:
    left = 0.0
    for name, width in bands.items():
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


__all__ = ["PHASES", "draw_gradients"]

check_public(globals())
