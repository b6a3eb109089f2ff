"""Curves and bars over a whole comparison: memory against batch size, throughput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.memory.measurement import Measurement
from utils.units import Category, Evidence
from utils.views.breakdown import NARROWEST_VISIBLE
from utils.views.style import (
    LOOKS,
    byte_unit,
    course_style,
    empty_figure,
    print_evidence,
)

CLOSEST_TICKS = 0.05  # of the axis
_LINE_COLORS = (
    *(LOOKS[c].color for c in (Category.PARAMETERS, Category.ACTIVATIONS, Category.GRADIENTS)),
    "black",
)


def draw_memory_by_batch(
    measurements: Sequence[Measurement],
    *,
    predicted_bytes: Mapping[int, float] | None = None,
    title: str = "What grows with the batch, and what does not",
) -> Figure:
    """Memory at the peak, by category, against the items per step.

    Args:
        measurements: at least two, with different `items`.
        predicted_bytes: a formula's totals by batch size, drawn as a dashed line.

    Raises:
        ValueError: fewer than two batch sizes.
    """
    ordered = _by_items(measurements)
    peaks = [m.peak_bytes for m in ordered]
    unit_bytes, unit = byte_unit(max([*peaks, *(predicted_bytes or {}).values()]))
    with course_style():
        figure, axes = empty_figure()
        _stack(axes, ordered, unit_bytes)
        _predicted_line(axes, predicted_bytes or {}, unit_bytes, "predicted total")
        _label_batches(axes, ordered, unit)
        axes.set_title(title)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        kinds = [m.evidence for m in ordered] + [Evidence.PREDICTED] * bool(predicted_bytes)
        print_evidence(figure, kinds, [m.device for m in ordered])
    return figure


def draw_peaks(
    runs: Mapping[str, Sequence[Measurement]],
    *,
    limits: Mapping[str, float] | None = None,
    predicted_bytes: Mapping[str, Mapping[int, float]] | None = None,
    title: str = "The peak against the batch",
) -> Figure:
    """One line of peaks a name, against the items per step. Hollow points were not measured.

    Args:
        runs: by name, each of at least two batch sizes; up to four names.
        limits: bytes by name, such as a card's memory, drawn as horizontal lines.
        predicted_bytes: totals by batch size that a formula gives, by name, drawn dashed.

    Raises:
        ValueError: a name has fewer than two batch sizes.
    """
    if not 1 <= len(runs) <= 4:
        raise ValueError(f"draw_peaks: runs has {len(runs)} names; give one to four.")
    lines = {name: _by_items(measurements) for name, measurements in runs.items()}
    everything = [m for line in lines.values() for m in line]
    unit_bytes, unit = byte_unit(max((m.peak_bytes for m in everything), default=1))
    styles = zip(_LINE_COLORS, ("o-", "s--", "^-.", "D:"), strict=True)
    with course_style():
        figure, axes = empty_figure(height=3.8)
        for (name, line), (color, style) in zip(lines.items(), styles, strict=False):
            _totals(axes, line, unit_bytes, style, name, color)
        for name, totals in (predicted_bytes or {}).items():
            _predicted_line(axes, totals, unit_bytes, f"{name} (predicted)")
        for (name, limit), style in zip((limits or {}).items(), cycle((":", "-.")), strict=False):
            axes.axhline(limit / unit_bytes, color="black", ls=style, label=name)
        _label_batches(axes, everything, unit)
        axes.set_title(title)
        axes.legend()
        kinds = [m.evidence for m in everything] + [Evidence.PREDICTED] * bool(predicted_bytes)
        print_evidence(figure, kinds, [m.device for m in everything])
    return figure


def _by_items(measurements: Sequence[Measurement]) -> list[Measurement]:
    ordered = sorted(measurements, key=lambda m: m.items)
    if len({m.items for m in ordered}) < 2:
        raise ValueError("A curve over the batch size needs measurements of two sizes or more.")
    return ordered


def _label_batches(axes: Axes, measurements: Sequence[Measurement], unit: str) -> None:
    axes.set_xlabel(f"batch size ({measurements[0].unit})")
    axes.set_ylabel(f"memory at the peak ({unit})")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xticks(_spaced({m.items for m in measurements}))


def _predicted_line(
    axes: Axes, predicted_bytes: Mapping[int, float], unit_bytes: int, name: str
) -> None:
    sizes = sorted(predicted_bytes)
    if sizes:
        axes.plot(sizes, [predicted_bytes[size] / unit_bytes for size in sizes], "k--", label=name)


def _spaced(sizes: Iterable[int]) -> list[int]:
    """The sizes whose numbers have room on the axis, from the largest down."""
    kept: list[int] = []
    largest = max(sizes)
    for size in sorted(sizes, reverse=True):
        if not kept or kept[-1] - size > CLOSEST_TICKS * largest:
            kept.append(size)
    return kept[::-1]


def _stack(axes: Axes, ordered: Sequence[Measurement], unit_bytes: int) -> None:
    sizes = [m.items for m in ordered]
    highest_bytes = max(m.peak_bytes for m in ordered)
    floor = np.zeros(len(ordered))
    for category in Category:
        values = np.array([m.breakdown[category] for m in ordered]) / unit_bytes
        if not values.any():
            continue
        visible = values.max() * unit_bytes >= NARROWEST_VISIBLE * highest_bytes
        look = LOOKS[category]
        axes.fill_between(
            sizes,
            floor,
            floor + values,
            facecolor=look.color,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0,
            label=str(category) if visible else "",
        )
        floor = floor + values
    _totals(axes, ordered, unit_bytes, "o-", "total", "black")


def _totals(
    axes: Axes, runs: Sequence[Measurement], unit_bytes: int, style: str, name: str, color: str
) -> None:
    """A line through the peaks; hollow where they were not measured."""
    is_measured = all(m.evidence is Evidence.MEASURED for m in runs)
    axes.plot(
        [m.items for m in runs],
        [m.peak_bytes / unit_bytes for m in runs],
        style,
        color=color,
        lw=1.8,
        ms=6,
        label=name,
        markerfacecolor=color if is_measured else "white",
    )


def draw_losses(
    curves: Mapping[str, Sequence[float]],
    *,
    minus: str = "",
    evidence: Evidence = Evidence.MEASURED,
    device: str = "",
    title: str = "Training loss",
    unit: str = "",
) -> Figure:
    """One loss curve per name, over the steps; what lies on top of another is dashed.

    Args:
        curves: losses by name.
        minus: the name of a curve that is taken from all others, where they would hide each
            other; its own is left out.
        evidence: of the losses.
        device: where they were computed.
        title: of the figure.
        unit: the loss's, such as "nats per byte".

    Raises:
        ValueError: no curve, one without values, or none is called `minus`.
    """
    if not curves or not all(len(losses) for losses in curves.values()):
        raise ValueError("draw_losses() needs a list of losses for each name.")
    quantity = f"loss minus that of {minus}" if minus else "loss"
    with course_style():
        figure, axes = empty_figure()
        for number, (name, losses) in enumerate(_less(curves, minus).items()):
            style = ("-", "--", ":", "-.")[number % 4]
            color = _LINE_COLORS[number % len(_LINE_COLORS)]
            axes.plot(range(1, len(losses) + 1), losses, style, color=color, lw=2, label=name)
        if minus:
            axes.axhline(0, color="black", lw=1)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(f"{quantity} ({unit})" if unit else quantity)
        axes.set_title(title)
        axes.legend()
        print_evidence(figure, [evidence], [device])
    return figure


def _less(curves: Mapping[str, Sequence[float]], minus: str) -> Mapping[str, Sequence[float]]:
    """The curves less the one called `minus`, step by step; as they are without a name."""
    if not minus:
        return curves
    if minus not in curves or len(curves) < 2:
        raise ValueError(f"minus={minus!r} needs a curve of that name and one more.")
    base = curves[minus]
    return {
        name: [a - b for a, b in zip(losses, base, strict=False)]
        for name, losses in curves.items()
        if name != minus
    }
