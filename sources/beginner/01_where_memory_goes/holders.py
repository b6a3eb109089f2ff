"""The figure of lesson 01's last section: tensors of one size at the peak, each by itself."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.memory import Measurement
from utils.memory.events import Allocation
from utils.rules import some
from utils.units import Category
from utils.views.style import LOOKS, byte_unit, course_style, empty_figure, print_evidence, wrapped

__all__ = ["alive_tensors", "draw_holders"]

BESIDE = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.ACTIVATIONS)


def alive_tensors(measurement: Measurement, tensor_bytes: int) -> list[Allocation]:
    """The blocks of one size that are alive at the peak, the oldest first."""
    peak_ns = measurement.timeline.peak_ns
    alive = [
        block
        for block in measurement.timeline.allocations
        if block.bytes == tensor_bytes
        and block.category not in BESIDE
        and block.born_ns <= peak_ns
        and (block.died_ns is None or block.died_ns > peak_ns)
    ]
    return sorted(alive, key=lambda block: block.born_ns)


def draw_holders(
    runs: Sequence[Measurement], tensor_bytes: int, names: Sequence[str], *, title: str
) -> Figure:
    """A bar a run: what else is alive at its peak, then each of the tensors with its number.

    Args:
        runs: the first has all of the tensors; one that lacks some lacks the oldest.
        tensor_bytes: of each tensor.
        names: of the tensors, in the order in which they are made.
        title: of the figure.

    Raises:
        ValueError: there is no run, or one has more such tensors than there are names.
    """
    some("draw_holders", runs=runs)
    highest = max(run.peak_bytes for run in runs)
    with course_style():
        figure, axes = empty_figure(height=1.6 + 0.9 * len(runs))
        for row, run in enumerate(runs):
            _draw_bar(axes, row, run, alive_tensors(run, tensor_bytes), len(names))
        unit_bytes, unit = byte_unit(highest)
        axes.set_yticks(range(len(runs)), [wrapped(run.name) for run in runs])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * highest / unit_bytes)
        axes.grid(False, axis="y")
        axes.set_xlabel(f"memory at the peak ({unit})")
        axes.set_title(title)
        figure.legend(handles=_legend(names), loc="outside right upper")
        print_evidence(figure, [r.evidence for r in runs], [r.device for r in runs])
    return figure


def _draw_bar(axes: Axes, row: int, run: Measurement, tensors: list[Allocation], most: int) -> None:
    if len(tensors) > most:
        raise ValueError(f"{run.name} has {len(tensors)} tensors of this size, and {most} names.")
    unit_bytes, unit = byte_unit(run.peak_bytes)
    left = 0.0
    for category in BESIDE:
        left = _draw_part(axes, row, left, run.breakdown[category] / unit_bytes, category)
    for number, block in enumerate(tensors, most - len(tensors) + 1):
        right = _draw_part(axes, row, left, block.bytes / unit_bytes, block.category)
        box = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "linewidth": 0}
        axes.text((left + right) / 2, row, str(number), ha="center", va="center", bbox=box)
        left = right
    peak = run.peak_bytes / unit_bytes
    axes.text(peak, row, f"  {peak:.2f} {unit}", va="center", fontsize=11)


def _draw_part(axes: Axes, row: int, left: float, width: float, category: Category) -> float:
    look = LOOKS[category]
    axes.barh(row, width, 0.6, left, color=look.color, hatch=look.hatch, edgecolor="white")
    return left + width


def _legend(names: Sequence[str]) -> list[Patch]:
    """The categories beside them by their looks, the tensors by their numbers."""
    beside = [
        Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, edgecolor="white", label=str(c))
        for c in BESIDE
    ]
    numbered = [
        Patch(facecolor="none", edgecolor="none", label=f"{number}  {name}")
        for number, name in enumerate(names, 1)
    ]
    return beside + numbered


check_public(globals())
