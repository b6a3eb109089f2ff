"""Who holds what, and who sends to whom: a plan whose stages each fill a node."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from utils.planner import Estimate
from utils.planner.plan_estimate import BYTES_INTERVAL
from utils.planner.traffic import axis_bytes
from utils.units import GB, GIB
from utils.views.plan_figures import stack_stages, stage_parts
from utils.views.rank_map import axis_links
from utils.views.style import course_style, print_evidence

__all__ = ["draw_memory_beside", "draw_placement"]

COLUMNS, ROWS = 2, 4  # of GPUs in a node
STEP = 3.1  # from node to node, in widths of a GPU
GPU, GROUP, SEND = "#cfe3f5", "#1a5c94", "#bd1f01"
SMALLEST_SHOWN = 0.01  # of the fullest bar: what is thinner has no entry in the legend


def draw_placement(found: Estimate, *, title: str) -> Figure:
    """Each node with its stage, its groups of tensor parallelism and the sends to the next stage.

    Raises:
        ValueError: a stage is not one node of eight.
    """
    plan, per_node = found.plan, found.cluster.gpus_per_node
    if not plan.tp * plan.dp == per_node == COLUMNS * ROWS:
        raise ValueError("draw_placement() draws plans whose tp x dp is one node of 8 GPUs.")
    lines = _links(found)
    with course_style():
        figure = Figure(figsize=(10.5, 2.45 + 0.39 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        for stage in range(plan.pp):
            _draw_node(axes, found, stage)
        axes.set_xlim(-0.2, plan.pp * STEP - 0.8)
        axes.set_ylim(-0.75 - 0.8 * len(lines), ROWS + 0.7)
        axes.set_aspect("equal")
        axes.set_axis_off()
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        for line, (color, text) in enumerate(lines):
            axes.text(0, -0.75 - 0.8 * line, text, fontsize=9.5, va="center", color=color)
        print_evidence(figure, [found.evidence])
    return figure


def _draw_node(axes: Axes, found: Estimate, stage: int) -> None:
    plan, left = found.plan, stage * STEP
    frame = Rectangle((left - 0.12, -0.12), COLUMNS + 0.24, ROWS + 0.24, fill=False, linewidth=1.2)
    axes.add_patch(frame)
    axes.text(left, ROWS + 0.25, f"node {stage}: s{stage}", fontsize=8.5, va="bottom")
    for local in range(COLUMNS * ROWS):
        column, row = divmod(local, ROWS)
        x, y = left + column, ROWS - 1 - row
        axes.add_patch(Rectangle((x + 0.08, y + 0.08), 0.84, 0.84, facecolor=GPU))
        replica, slice_ = divmod(local, plan.tp)
        words = f"t{slice_}" + f"\nd{replica}" * (plan.dp > 1)
        axes.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=7.5)
    wide = max(1, plan.tp // ROWS)
    for first in range(0, COLUMNS, wide):
        box = FancyBboxPatch(
            (left + first + 0.06, 0.06), wide - 0.12, ROWS - 0.12, boxstyle="round,pad=0.02",
            fill=False, edgecolor=GROUP, linewidth=2.0,
        )  # fmt: skip
        axes.add_patch(box)
    for row in range(ROWS if plan.dp > 1 else 0):  # replicas of a slice share its gradients
        ends = [left + 0.74, left + 1.26]
        axes.plot(ends, [row + 0.24] * 2, color="black", lw=2.0, zorder=4)
    if stage < plan.pp - 1:
        ends = (left + COLUMNS + 0.12, ROWS / 2), (left + STEP - 0.12, ROWS / 2)
        axes.add_patch(
            FancyArrowPatch(*ends, arrowstyle="<|-|>", mutation_scale=10, color=SEND, lw=2.2)
        )


def _links(found: Estimate) -> list[tuple[str, str]]:
    """A line an axis: over which link it talks, what a GPU of stage 1 sends in a step, and how long
    that takes at the link's line rate."""
    plan, cluster = found.plan, found.cluster
    sent = axis_bytes(found.model, plan, found.batch)[1]
    near = cluster.device.gpu_link
    speed = (
        f"NVLink, {near.link_bytes_per_second / GB:.0f} GB/s a direction" if near else "the node"
    )
    far = cluster.network_bytes_per_second / cluster.gpus_per_node / GB
    tp_seconds = f", {sent['tp'] / near.link_bytes_per_second:.0f} s at line rate" if near else ""
    pp_seconds = sent["pp"] / GB / far
    lines = [
        (GROUP, f"blue group: TP {plan.tp}, gathers and scatters in every block over {speed}; a GPU "
         f"sends {sent['tp'] / GB:,.0f} GB a step{tp_seconds}"),
        (SEND, f"red: {COLUMNS * ROWS} parallel sends, each GPU to its own t"
         + " and d" * (plan.dp > 1) + f"; activations forth, gradients back; {far:.0f} GB/s a GPU; "
         f"{sent['pp'] / GB:,.0f} GB a step, {pp_seconds:.1f} s at line rate"),
    ]  # fmt: skip
    if plan.dp > 1:
        place = axis_links(found)["dp"]
        text = f"black: DP {plan.dp}, the same t of d0 and d1, {place}, once a step: {sent['shard'] / GB:,.0f} GB"
        if near:
            text += f", {sent['shard'] / near.link_bytes_per_second:.2f} s at line rate"
        lines.append(("black", text))
    return lines


def draw_memory_beside(plans: Sequence[Estimate], *, title: str) -> Figure:
    """One GPU of each stage, for several models in one layout; with what the first stage leaves.

    Raises:
        ValueError: no plans.
    """
    if not plans:
        raise ValueError("draw_memory_beside() needs plans of estimate().")
    with course_style():
        figure = Figure(figsize=(10.5, 4.2), layout="constrained")
        panels = figure.subplots(1, len(plans), sharey=True, squeeze=False)[0]
        handles: list[Patch | Line2D] = []
        for axes, found in zip(panels, plans, strict=True):
            handles = [*stack_stages(axes, found), _interval(axes, found)]
            needed, room = found.peak.needed_bytes, found.cluster.device.memory_bytes
            axes.set_title(
                f"{found.model.name}: {(room - needed) / GIB:.0f} GiB empty on stage 0", fontsize=11
            )
        for axes in panels[1:]:
            axes.set_ylabel("")
        visible = [
            h for h in handles if isinstance(h, Line2D) or _visible(str(h.get_label()), plans)
        ]
        figure.legend(handles=visible, loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        print_evidence(figure, [plans[0].evidence])
    return figure


def _interval(axes: Axes, found: Estimate) -> Line2D:
    """The planner's interval of bytes, as a line over each bar."""
    needed = [row.needed_bytes / GIB for row in found.stages]
    low, high = ([factor * size for size in needed] for factor in BYTES_INTERVAL)
    axes.vlines(range(len(needed)), low, high, color="black", lw=2.2, zorder=4)
    words = "interval of bytes: x {} to {}".format(*BYTES_INTERVAL)
    return Line2D([], [], color="black", lw=2.2, label=words)


def _visible(name: str, plans: Sequence[Estimate]) -> bool:
    rows = [row for found in plans for row in found.stages]
    highest = max(row.needed_bytes for row in rows)
    return max(stage_parts(row)[name] for row in rows) > SMALLEST_SHOWN * highest
