"""Figures of a plan: the memory of each pipeline stage, and plans by seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.planner import Estimate, StageMemory, plan_name
from utils.units import GIB, Category, Evidence
from utils.views.breakdown import NARROWEST_VISIBLE
from utils.views.style import LOOKS, Look, course_style, empty_figure, print_evidence

# Workspaces and what lies outside the allocator, in one: neither is a tensor of the model.
PLAN_LOOKS: dict[str, Look] = {
    "workspaces and context": LOOKS[Category.OTHER],
}
MOST_TICKS = 16
HIGHEST_DRAWN = 1.5  # of the GPU's memory


def stage_parts(row: StageMemory) -> dict[str, float]:
    """Bytes of one stage's GPU by category, workspaces and context as one; the sum is needed."""
    parts: dict[str, float] = {**row.bytes_by_category}
    parts["workspaces and context"] = parts.pop("workspaces") + row.context_bytes
    return parts


def look_of(category: str) -> Look:
    """How a category of the planner is filled."""
    return PLAN_LOOKS[category] if category in PLAN_LOOKS else LOOKS[Category(category)]


def draw_stage_memory(
    found: Estimate, *, title: str = "", simulated: Mapping[int, int] | None = None
) -> Figure:
    """The peak of one GPU of each pipeline stage, stacked by category, below the GPU's memory.

    Args:
        found: The plan.
        title: Of the figure.
        simulated: Peaks of the allocator in bytes, by stage, drawn as diamonds: beside the bars
            without what lies outside the allocator.
    """
    with course_style():
        figure, axes = empty_figure()
        handles = stack_stages(axes, found)
        if simulated:
            handles += _mark(axes, simulated)
        axes.set_title(title or f"One GPU of each stage: {plan_name(found)}")
        figure.legend(handles=handles, loc="outside right upper")
        print_evidence(figure, [found.evidence, *[Evidence.SIMULATED] * bool(simulated)])
    return figure


def _mark(axes: Axes, peaks: Mapping[int, int]) -> list[Line2D]:
    sizes = [size / GIB for size in peaks.values()]
    return axes.plot(
        list(peaks),
        sizes,
        "D",
        ms=9,
        mfc="white",
        mec="black",
        mew=1.5,
        zorder=4,
        label="simulated peak",
    )


def stack_stages(axes: Axes, found: Estimate) -> list[Patch]:
    """Draw the stages into `axes`; returns the legend's entries, topmost first."""
    parts = [stage_parts(row) for row in found.stages]
    highest = max(row.needed_bytes for row in found.stages)
    handles: list[Patch] = []
    floor = [0.0] * len(parts)
    for name in parts[0]:
        sizes = [part[name] / GIB for part in parts]
        look = look_of(name)
        axes.bar(
            range(len(parts)), sizes, bottom=floor, width=0.8, color=look.color, hatch=look.hatch
        )
        if max(sizes) * GIB > NARROWEST_VISIBLE * highest:
            handles.append(Patch(facecolor=look.color, hatch=look.hatch, label=name))
        floor = [low + size for low, size in zip(floor, sizes, strict=True)]
    _limit(axes, found, highest)
    every = -(-len(parts) // MOST_TICKS)
    axes.set_xticks(range(0, len(parts), every))
    axes.set_xlim(-0.6, len(parts) - 0.4)
    axes.set_xlabel("pipeline stage")
    axes.set_ylabel("memory of one GPU (GiB)")
    axes.grid(False, axis="x")
    return handles[::-1]


def _limit(axes: Axes, found: Estimate, highest_bytes: float) -> None:
    gpu = found.cluster.device
    room = gpu.memory_bytes / GIB
    axes.axhline(room, color="black", linestyle="--", linewidth=1.5)
    axes.annotate(
        f"{gpu.name}, {room:.1f} GiB usable",
        (1, room),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0},
        zorder=5,
    )
    axes.set_ylim(0, 1.15 * max(room, highest_bytes / GIB))


def draw_pareto(
    found: Sequence[Estimate], *, pareto: Sequence[Estimate] = (), title: str = ""
) -> Figure:
    """Plans by seconds of a step and bytes of the fullest GPU.

    The axis ends at half as much memory again as the GPU has: what lies above is not drawn.

    Args:
        found: All plans to draw; those that do not fit are drawn hollow.
        pareto: Those that no other beats, joined by a line and named.
        title: Of the figure.

    Raises:
        ValueError: nothing to draw, or the plans are for different GPUs.
    """
    if not found and not pareto:
        raise ValueError("draw_pareto() needs at least one plan.")
    everything = [*found, *pareto]
    if len({row.cluster.gpu for row in everything}) > 1:
        raise ValueError("One figure has one limit: draw plans for different GPUs apart.")
    with course_style():
        figure, axes = empty_figure()
        _scatter(axes, [row for row in found if row.fits and not row.tight], "fits", "#94a4a2")
        _scatter(
            axes,
            [row for row in found if row.fits and row.tight],
            "fits, within the allocator's reach",
            "#ffa90e",
        )
        _scatter(axes, [row for row in found if not row.fits], "does not fit", "none")
        _join(axes, pareto)
        axes.set_xlabel("seconds of one step")
        axes.set_ylabel("memory of the fullest GPU (GiB)")
        axes.set_title(title or "Every plan is a trade of memory against time")
        _limit(axes, everything[0], 0.0)
        lowest = min(row.peak.needed_bytes for row in everything) / GIB
        axes.set_ylim(0.9 * lowest, HIGHEST_DRAWN * everything[0].cluster.device.memory_bytes / GIB)
        figure.legend(loc="outside right upper")
        print_evidence(figure, [row.evidence for row in everything])
    return figure


def _scatter(axes: Axes, rows: Sequence[Estimate], label: str, color: str) -> None:
    if rows:
        axes.scatter(
            [row.step_seconds for row in rows],
            [row.peak.needed_bytes / GIB for row in rows],
            s=22,
            facecolors=color,
            edgecolors="#717581",
            linewidths=0.8,
            label=label,
        )


def _join(axes: Axes, pareto: Sequence[Estimate]) -> None:
    """The front as a line, its points numbered; the numbers are the legend's."""
    if not pareto:
        return
    points = [(row.step_seconds, row.peak.needed_bytes / GIB) for row in pareto]
    axes.plot(
        *zip(*points, strict=True),
        "o-",
        color=LOOKS[Category.ACTIVATIONS].color,
        ms=7,
        label="no plan beats these",
    )
    for number, (row, point) in enumerate(zip(pareto, points, strict=True), start=1):
        side = -13 if number % 2 else 7
        axes.annotate(
            str(number), point, xytext=(side, -3), textcoords="offset points", fontsize=10
        )
        axes.plot([], [], " ", label=f"{number}  {plan_name(row)}")
