"""One category over the time of a step, for several runs beside each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.memory.measurement import Measurement
from utils.units import Category, Phase
from utils.views.style import LOOKS, PHASE_SHADES, byte_unit, course_style, print_evidence


def draw_over_time(
    runs: Mapping[str, Measurement],
    category: str,
    *,
    per: int | None = None,
    per_name: str = "parameter",
    title: str = "",
) -> Figure:
    """A panel for each run: a category's bytes through the phases of one step, on one scale.

    A phase is as wide as it has allocator events, so that short phases can be read as well.

    Args:
        runs: by name.
        category: such as "gradients".
        per: divides the bytes; `per_name` says what it counts.

    Raises:
        ValueError: no run, or a name that is no category.
    """
    if not runs or category not in list(Category):
        raise ValueError(f"draw_over_time() takes runs and one of {', '.join(Category)}.")
    kind = Category(category)
    curves = {name: _curve(run, kind) for name, run in runs.items()}
    highest = max(curve.max() for curve in curves.values())
    unit_bytes, unit = (per, f"bytes per {per_name}") if per else byte_unit(highest)
    with course_style():
        figure = Figure(figsize=(3.0 * len(runs) + 0.8, 3.6), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            _draw_panel(axes, run, curves[name] / unit_bytes, kind)
            axes.set_title(name, fontsize=12)  # on the left, as every title of the course
            axes.set_ylim(0, 1.15 * highest / unit_bytes)
        panels[0].set_ylabel(f"{category} ({unit})")
        figure.supxlabel("")
        figure.suptitle(
            title or f"{category.capitalize()} through one step",
            x=0.01,
            ha="left",
            fontsize=13,
            fontweight="bold",
        )
        print_evidence(
            figure, [m.evidence for m in runs.values()], [m.device for m in runs.values()]
        )
    return figure


def _curve(run: Measurement, category: Category) -> np.ndarray:
    series = run.timeline.series()
    return series.get(category, np.zeros(len(run.timeline.times_ns)))


def _draw_panel(axes: Axes, run: Measurement, curve: np.ndarray, category: Category) -> None:
    timeline, numbers = run.timeline, np.arange(len(curve))
    look = LOOKS[category]
    for span in timeline.spans:
        left, right = np.searchsorted(timeline.times_ns, [span.start_ns, span.end_ns])
        axes.axvspan(left, right, color=PHASE_SHADES[span.phase], zorder=0, linewidth=0)
        if right - left > 0.15 * len(curve):
            short = "step" if span.phase is Phase.OPTIMIZER_STEP else span.name
            axes.text(
                (left + right) / 2,
                0.99,
                short,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=9,
                color="#444444",
            )
    axes.fill_between(
        numbers, 0, curve, step="post", color=look.color, hatch=look.hatch, linewidth=0
    )
    axes.set_xlim(0, len(curve))
    axes.set_xticks([])
    axes.set_xlabel("allocator events, in order")
