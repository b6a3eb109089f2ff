"""Curves and bars over a whole comparison: memory against batch size, throughput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.memory.measurement import Measurement
from utils.units import Category, Evidence, parse_bytes
from utils.views.breakdown import NARROWEST_VISIBLE
from utils.views.style import (
    LOOKS,
    byte_unit,
    course_style,
    empty_figure,
    print_evidence,
    wrapped,
)

CLOSEST_TICKS = 0.05  # of the axis


def draw_memory_by_batch(
    measurements: Sequence[Measurement],
    *,
    predicted_bytes: Mapping[int, float] | None = None,
    others: Mapping[str, Sequence[Measurement]] | None = None,
    limit: str = "",
    title: str = "What grows with the batch, and what does not",
) -> Figure:
    """Memory at the peak, by category, against the items per step. Hollow points were not measured.

    Args:
        measurements: at least two, with different `items`.
        predicted_bytes: a formula's totals by batch size, drawn as a dashed line.
        others: totals of other runs by name, drawn as lines of squares; at most two names.
        limit: a card's memory, such as "16GB".

    Raises:
        ValueError: fewer than two batch sizes.
    """
    ordered = sorted(measurements, key=lambda m: m.items)
    if len({m.items for m in ordered}) < 2:
        raise ValueError("A curve over the batch size needs measurements of two sizes or more.")
    beside = {name: sorted(runs, key=lambda m: m.items) for name, runs in (others or {}).items()}
    everything = ordered + [m for runs in beside.values() for m in runs]
    peaks = [m.peak_bytes for m in everything]
    card = [parse_bytes(limit)] if limit else []
    unit_bytes, unit = byte_unit(max(peaks + card + list((predicted_bytes or {}).values())))
    with course_style():
        figure, axes = empty_figure()
        _stack(axes, ordered, unit_bytes)
        if predicted_bytes:
            sizes = sorted(predicted_bytes)
            totals = [predicted_bytes[size] / unit_bytes for size in sizes]
            axes.plot(sizes, totals, "k--", label="predicted total")
        for (name, runs), style in zip(beside.items(), ("ks-.", "ks:"), strict=False):
            _totals(axes, runs, unit_bytes, style, name)
        _limit_line(axes, limit, unit_bytes)
        axes.set_xlabel(f"batch size ({ordered[0].unit})")
        axes.set_ylabel(f"memory at the peak ({unit})")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        axes.set_xticks(_spaced({m.items for m in everything} | set(predicted_bytes or {})))
        kinds = [m.evidence for m in everything] + [Evidence.PREDICTED] * bool(predicted_bytes)
        print_evidence(figure, kinds, [m.device for m in everything])
    return figure


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
            sizes, floor, floor + values, facecolor=look.color, hatch=look.hatch,
            edgecolor="white", linewidth=0, label=str(category) if visible else "",
        )  # fmt: skip
        floor = floor + values
    _totals(axes, ordered, unit_bytes, "ko-", "total")


def _totals(
    axes: Axes, runs: Sequence[Measurement], unit_bytes: int, style: str, name: str
) -> None:
    """A line through the peaks; hollow where the peak was not measured."""
    axes.plot([m.items for m in runs], [m.peak_bytes / unit_bytes for m in runs], style,
              lw=1.5, ms=6, label=name)  # fmt: skip
    computed = [m for m in runs if m.evidence is not Evidence.MEASURED]
    if computed:
        axes.plot([m.items for m in computed], [m.peak_bytes / unit_bytes for m in computed],
                  style[:2], ms=6, markerfacecolor="white",
                  label=f"{name}, {computed[0].evidence}")  # fmt: skip


def _limit_line(axes: Axes, limit: str, unit_bytes: int) -> None:
    if limit:
        axes.axhline(parse_bytes(limit) / unit_bytes, color="black", ls=":", label=f"{limit} card")


def draw_throughput(measurements: Sequence[Measurement], *, title: str = "Throughput") -> Figure:
    """Items per second of each measurement; the whisker spans the fastest and slowest step.

    Raises:
        ValueError: a measurement was taken without timed steps, or units differ.
    """
    untimed = [m.name for m in measurements if not m.step_seconds]
    if untimed or not measurements:
        raise ValueError(f"Throughput needs timed steps; none in {untimed or 'an empty list'}.")
    units = sorted({m.unit for m in measurements})
    if len(units) > 1:
        raise ValueError(f"One axis cannot show {' and '.join(units)}: draw a figure for each.")
    with course_style():
        figure, axes = empty_figure(height=1.6 + 0.6 * len(measurements))
        for row, m in enumerate(measurements):
            _draw_speed(axes, row, m)
        axes.set_yticks(range(len(measurements)), [wrapped(m.name) for m in measurements])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.margins(x=0.15)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"{measurements[0].unit} per second")
        axes.set_title(title)
        print_evidence(figure, [m.evidence for m in measurements], [m.device for m in measurements])
    return figure


def _draw_speed(axes: Axes, row: int, m: Measurement) -> None:
    rate = m.items_per_second or 0.0
    rates = [m.items / seconds for seconds in m.step_seconds]
    whisker = [[rate - min(rates)], [max(rates) - rate]]
    axes.barh(row, rate, height=0.55, color=LOOKS[Category.PARAMETERS].color)
    axes.errorbar(rate, row, xerr=whisker, color="black", capsize=4, lw=1.5)
    axes.text(max(rates), row, f"  {m.throughput}", va="center", fontsize=11)


def draw_losses(
    curves: Mapping[str, Sequence[float]],
    *,
    evidence: Evidence = Evidence.MEASURED,
    device: str = "",
    title: str = "Training loss",
    unit: str = "",
) -> Figure:
    """One loss curve per name, over the steps; what lies on top of another is dashed.

    `unit` is the loss's, such as "nats per byte".

    Raises:
        ValueError: no curve, or one without values.
    """
    if not curves or not all(len(losses) for losses in curves.values()):
        raise ValueError("draw_losses() needs a list of losses for each name.")
    colors = [LOOKS[c].color for c in (Category.PARAMETERS, Category.ACTIVATIONS)]
    colors += [LOOKS[Category.GRADIENTS].color, "black"]
    with course_style():
        figure, axes = empty_figure()
        for number, (name, losses) in enumerate(curves.items()):
            style = ("-", "--", ":", "-.")[number % 4]
            color = colors[number % len(colors)]
            axes.plot(range(1, len(losses) + 1), losses, style, color=color, lw=2, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss ({unit})" if unit else "loss")
        axes.set_title(title)
        axes.legend()
        print_evidence(figure, [evidence], [device])
    return figure
