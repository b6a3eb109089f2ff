"""Figures of the flight recorder: one run in four panels, twins side by side, what a scaler does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.rules import some
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

if TYPE_CHECKING:
    from utils.techniques.numerics_recorder import StepRecord

MOST_NAMES = 14
BAD = "#bd1f01"
RINGED = "ring: last layer's weights get zeros"
DEAD = 0.9  # of a layer's gradient is zero: what it put out was zero, too
STYLES = ("o-", "s-", "^:")  # of twins, each thinner than the one below it: equal losses show all
SIZES, WIDTHS = (9, 6, 3), (6.0, 3.2, 1.2)
SMALLEST_FP16 = 2.0**-24


def draw_flight(records: Sequence[StepRecord], *, title: str = "Flight recorder") -> Figure:
    """Four views of a run: loss, gradient norms, loss scale, share of zero gradients per layer.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("There is nothing to draw: call recorder.record(loss) after each step.")
    with course_style():
        figure = Figure(figsize=(10, 5.8), layout="constrained")
        panels = figure.subplots(2, 2)
        _draw_loss(panels[0, 0], records)
        _draw_norms(panels[0, 1], records)
        _draw_scale(panels[1, 0], records)
        _draw_layers(figure, panels[1, 1], records)
        for axes in panels.flat:
            axes.set_xlabel("step")
            axes.set_xlim(-0.7, len(records) - 0.3)
        figure.suptitle(_headline(title, records), x=0.01, ha="left", fontsize=13)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def draw_twins(
    runs: Mapping[str, Sequence[StepRecord]],
    *,
    title: str,
    mark: tuple[int, str] | None = None,
    log: bool = False,
) -> Figure:
    """The losses of up to three runs in one panel, and the scale of the first in another.

    Args:
        runs: records by the name of the run; the first one has the scaler.
        title: says what is found.
        mark: a step, and what happens there.
        log: a logarithmic axis of losses.

    Raises:
        ValueError: there is no run.
    """
    some("draw_twins", runs=runs)
    with course_style():
        figure = Figure(figsize=(10, 4.0), layout="constrained")
        losses, scale = figure.subplots(1, 2, width_ratios=[3, 2])
        for row, (name, records) in enumerate(runs.items()):
            _draw_twin(losses, row, name, records)
        if log:
            losses.set_yscale("log")
        else:
            losses.set_ylim(bottom=0)
        losses.set_title("loss")
        _draw_scale(scale, next(iter(runs.values())))
        scale.set_title(f"loss scale, {next(iter(runs))}")
        for axes in (losses, scale):
            axes.set_xlabel("step")
            axes.set_xlim(-0.7, max(map(len, runs.values())) - 0.3)
            if mark:
                axes.axvline(mark[0], color="#555555", lw=1, ls=":", label=mark[1])
        _legend_once(losses)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _draw_twin(axes: Axes, row: int, name: str, records: Sequence[StepRecord]) -> None:
    """A loss, ringed where the last layer got zeros only, with ticks where it is not finite."""
    steps, values = _finite(records, [r.loss for r in records])
    last = max((r.step for r in records if math.isfinite(r.loss)), default=-1)
    ends = "" if last == len(records) - 1 else f": NaN from step {last + 1}"
    style: dict[str, Any] = {"ms": SIZES[row], "lw": WIDTHS[row], "label": name + ends}
    axes.plot(steps, values, STYLES[row], **style)
    dead = [r.step for r in records if r.layers and [*r.layers.values()][-1].zero > DEAD]
    if dead:
        heights = [values[step] for step in dead]
        axes.plot(dead, heights, "o", ms=12, mfc="none", color="black", label=RINGED)
    gaps = [r.step for r in records[:last] if not math.isfinite(r.loss)]
    _mark_not_finite(axes, gaps, label=f"{name}: loss not finite")
    if ends and last >= 0:
        axes.annotate(
            f"{name} ends",
            (last, values[last]),
            xytext=(8, 26 + 12 * row),
            textcoords="offset points",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            arrowprops={"arrowstyle": "->", "shrinkB": 4},
        )


def draw_scale(records: Sequence[StepRecord], *, title: str) -> Figure:
    """The loss scale of a long run: its search, up to the first step taken, and its saw after it."""
    found = next((r.step for r in records if not r.skipped), len(records))
    with course_style():
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        axes = figure.subplots()
        _draw_scale(axes, records)
        axes.axvspan(-0.5, found - 0.5, color="#dddddd", lw=0, label="search: no step taken yet")
        axes.legend(loc="upper right")
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        axes.set_xlim(-0.7, len(records) - 0.3)
        axes.set_title(title)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def draw_gradient_sizes(gradients: torch.Tensor, scale: float, *, title: str) -> Figure:
    """Sizes of fp32 gradients beside what becomes zero in fp16, as they are and times a scale."""
    sizes = gradients.detach().abs().flatten()
    exponents = sizes[sizes > 0].log2().numpy()
    floor, top = math.log2(SMALLEST_FP16 / 2), math.log2(torch.finfo(torch.float16).max)
    with course_style():
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        axes = figure.subplots()
        looks: list[tuple[float, dict[str, Any], str]] = [
            (0.0, {"color": "#ffa90e", "hatch": "//"}, "as they are"),
            (math.log2(scale), {"color": "#3f90da"}, f"times {scale:,.0f}"),
        ]
        for shift, look, name in looks:
            lost = float((exponents + shift < floor).mean())
            low, high = math.floor(exponents.min()), math.ceil(exponents.max())
            label = f"{name}: {lost:.0%} become zero in fp16"
            bins = np.arange(low, high + 1) + shift
            axes.hist(exponents + shift, bins=bins, edgecolor="white", label=label, **look)
        axes.set_xlim(min(exponents.min(), floor) - 2, top + 2)
        axes.axvspan(axes.get_xlim()[0], floor, color="#dddddd", lw=0, zorder=0)
        for place, told in [(floor, "zero in fp16"), (top, "65,504")]:
            axes.axvline(place, color="black", lw=1)
            where: dict[str, Any] = {
                "transform": axes.get_xaxis_transform(),
                "ha": "right",
                "va": "top",
            }
            axes.text(place - 0.3, 0.97, told, fontsize=10, **where)
        axes.set_xlabel("size of a gradient, as a power of two")
        axes.set_ylabel("gradients")
        axes.set_title(title)
        axes.margins(y=0.35)
        axes.legend(loc="upper right", bbox_to_anchor=(0.9, 1))
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _draw_loss(axes: Axes, records: Sequence[StepRecord]) -> None:
    axes.plot(*_finite(records, [r.loss for r in records]), ".-")
    shown = [r.loss for r in records if math.isfinite(r.loss)]
    axes.set_ylim(0, 1.1 * max(shown, default=1.0))  # from zero: what stands still is to look so
    _mark_not_finite(axes, [r.step for r in records if not math.isfinite(r.loss)])
    axes.set_title("loss")


def _headline(title: str, records: Sequence[StepRecord]) -> str:
    first = next((r for r in records if r.first), None)
    return f"{title}\nfirst not finite: step {first.step}, {first.first}" if first else title


def _draw_norms(axes: Axes, records: Sequence[StepRecord]) -> None:
    after = _positive(records, [r.grad_norm for r in records])
    used = _positive(records, [math.nan if r.step_norm is None else r.step_norm for r in records])
    axes.plot(*after, ".-", label="after backward")
    axes.plot(*used, "x", color="black", ms=5, label="stepped with")
    _mark_not_finite(axes, [r.step for r in records if not math.isfinite(r.grad_norm)])
    shown = [norm for norm in (*after[1], *used[1]) if norm > 0]
    if not any(r.grad_norm > 0 for r in records):
        axes.text(0.5, 0.5, "zero in every step", transform=axes.transAxes, ha="center")
        axes.set_yticks([])
    elif max(shown, default=1) < 10 * min(shown, default=1):
        axes.set_ylim(bottom=0)  # on less than a decade a logarithmic axis has crowded labels
    else:
        axes.set_yscale("log")
    axes.set_title("norm of the gradients, unscaled")
    _legend_above_the_curve(axes)


def _legend_once(axes: Axes) -> None:
    """Below the panel, each label once: twins share the ring."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(),
        handles.keys(),
        fontsize=9,
        ncols=3,
        handlelength=1.6,
        columnspacing=1.0,
        loc="upper left",
        bbox_to_anchor=(-0.05, -0.22),
    )


def _legend_above_the_curve(axes: Axes) -> None:
    """In a row, in room of its own: a curve may pass anywhere."""
    axes.margins(y=0.05)
    low, high = axes.transScale.transform([(0, y) for y in axes.get_ylim()])[:, 1]
    top = axes.transScale.inverted().transform((0, high + 0.25 * (high - low)))[1]
    axes.set_ylim(top=top)
    axes.legend(loc="upper center", ncols=3, columnspacing=0.8, handlelength=1.2, handletextpad=0.3)


def _draw_scale(axes: Axes, records: Sequence[StepRecord]) -> None:
    axes.set_title("loss scale")
    scales = [r.scale for r in records if r.scale is not None]
    if len(scales) < len(records):
        axes.text(0.5, 0.5, "no scaler", transform=axes.transAxes, ha="center", color="#555555")
        axes.set_yticks([])
        return
    axes.step([r.step for r in records], scales, where="mid")
    skipped = [(r.step, scale) for r, scale in zip(records, scales, strict=True) if r.skipped]
    if skipped:
        label = f"{len(skipped)} step{'s' * (len(skipped) > 1)} skipped"
        axes.plot(*zip(*skipped, strict=True), "x", color=BAD, ms=8, mew=2, label=label)
        axes.legend(loc="best")
    axes.set_yscale("log", base=2)


def _draw_layers(figure: Figure, axes: Axes, records: Sequence[StepRecord]) -> None:
    names = list(dict.fromkeys(name for r in records for name in r.layers))
    zero, bad = np.full((2, len(names), len(records)), np.nan)
    for column, r in enumerate(records):
        for name, shares in r.layers.items():
            zero[names.index(name), column] = shares.zero
            if shares.overflowed:
                bad[names.index(name), column] = 1
    options = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 1}
    image = axes.imshow(zero, cmap="Blues", **options)
    axes.imshow(bad, cmap=ListedColormap([BAD]), **options)
    every = math.ceil(len(names) / MOST_NAMES)
    told = [_row_label(name, zero[row][bad[row] != 1]) for row, name in enumerate(names)]
    axes.set_yticks(range(0, len(names), every), told[::every], fontsize=9)
    axes.grid(False)
    rows, columns = np.nonzero(bad == 1)
    axes.plot(columns, rows, "x", color="white", ms=4, mew=0.8)
    axes.set_title("zero gradients (x: not finite)")
    figure.colorbar(image, ax=axes, label="share of zeros")


def _row_label(name: str, zero: np.ndarray) -> str:
    """A layer's name and its mean share of zeros in its finite steps: 98.5% looks like 100%."""
    shares = zero[np.isfinite(zero)]
    if not shares.size:
        return name
    share = 100 * float(shares.mean())
    return f"{name}  {min(share, 99.9) if share < 100 else 100:.3g}%"


def _mark_not_finite(axes: Axes, steps: Sequence[int], label: str = "not finite") -> None:
    if steps:
        height = [0.03] * len(steps)
        axes.plot(
            steps,
            height,
            "|",
            color=BAD,
            ms=9,
            mew=2,
            transform=axes.get_xaxis_transform(),
            label=label,
        )


def _finite(
    records: Sequence[StepRecord], values: Sequence[float]
) -> tuple[list[int], list[float]]:
    return [r.step for r in records], [v if math.isfinite(v) else math.nan for v in values]


def _positive(
    records: Sequence[StepRecord], values: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Values that a logarithmic axis can show."""
    steps, finite = _finite(records, values)
    return steps, [v if v > 0 else math.nan for v in finite]


__all__ = ["draw_flight", "draw_gradient_sizes", "draw_scale", "draw_twins"]

check_public(globals())
