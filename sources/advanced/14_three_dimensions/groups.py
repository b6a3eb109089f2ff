"""Ranks on nodes, a row a node: who talks with whom along each axis, and how much in a step."""

from __future__ import annotations

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.checked import check_public
from utils.planner import Estimate, axis_bytes
from utils.units import GB
from utils.views.style import course_style, print_evidence

__all__ = ["draw_groups"]

TP, SHARD, PP = "#1f6fb5", "#832db6", "#bd1f01"  # petroff10, arXiv:2107.02270; blue darkened
FIRST = 3  # nodes drawn at the top; the last one follows
HEIGHT = 2.1  # from node to node, in widths of a GPU
BRACKET = 2.75  # where the line of the shard axis lies above the first node


def draw_groups(found: Estimate, *, title: str = "") -> Figure:
    """Draw the first nodes and the last, with one group of each axis and every way between stages.

    Args:
        found: a plan whose stages fill a node each.
        title: of the figure.

    Raises:
        ValueError: a stage is more or less than a node, or there are too few.
    """
    plan, per_node = found.plan, found.cluster.gpus_per_node
    if plan.tp * plan.dp * plan.cp != per_node or plan.cp > 1 or plan.pp <= FIRST + 1:
        raise ValueError(
            f"draw_groups() draws plans whose stage fills a node of {per_node}, of more than "
            f"{FIRST + 1} stages; tp {plan.tp} x dp {plan.dp} x pp {plan.pp} is none."
        )
    sent = axis_bytes(found.model, plan, found.batch)[1]  # of a stage between the ends
    with course_style():
        figure = Figure(figsize=(10.5, 6.6), layout="constrained")
        axes = figure.add_subplot()
        shown = [*range(FIRST), plan.pp - 1]
        rows = {stage: -HEIGHT * (row + (row == FIRST) * 0.3) for row, stage in enumerate(shown)}
        for stage, y in rows.items():
            _draw_node(axes, found, stage, y)
            if stage:
                _draw_ways(axes, found, y, dashed=stage == plan.pp - 1)
        way = f"pp: {sent['pp'] / 2 / GB:,.1f} GB down\nand {sent['pp'] / 2 / GB:,.1f} GB up"
        axes.text(-2.4, rows[0] - 0.55, way, color=PP, fontsize=10, va="center")
        middle = (rows[FIRST - 1] + rows[plan.pp - 1]) / 2 + 0.5
        axes.text(-2.4, middle, f"nodes {FIRST} to {plan.pp - 2}\nalike", fontsize=10, va="center")
        _draw_rings(axes, plan.tp, plan.dp, f"{sent['tp'] / GB:,.0f} GB")
        _draw_pair(axes, plan.tp, f"{sent['shard'] / GB:,.1f} GB")
        axes.set_xlim(-2.5, per_node + 1.0)
        axes.set_ylim(rows[plan.pp - 1] - 1.3, 3.4)
        axes.set_axis_off()
        axes.set_title(title)
        axes.text(-2.4, rows[plan.pp - 1] - 0.4, _legend(found), fontsize=10, va="top")
        print_evidence(figure, [found.evidence])
    return figure


def _x(slot: int, tp: int) -> float:
    """Left edge of a GPU: a gap between replicas."""
    return slot + 0.5 * (slot // tp)


def _draw_node(axes: Axes, found: Estimate, stage: int, y: float) -> None:
    per_node, dims = found.cluster.gpus_per_node, found.plan.dims
    right = _x(per_node - 1, found.plan.tp) + 1.1
    axes.add_patch(Rectangle((-0.1, y - 0.1), right, 1.2, facecolor="none", edgecolor="black"))
    axes.text(-2.4, y + 0.5, f"node {stage}:\nstage {stage}", fontsize=10, va="center")
    for slot in range(per_node):
        rank = stage * per_node + slot
        name = f"rank {rank}\ntp {dims.coordinates(rank)['tp']}"
        x = _x(slot, found.plan.tp)
        box = Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor="#e8eef4", edgecolor="#717581")
        axes.add_patch(box)
        axes.text(x + 0.5, y + 0.5, name, fontsize=9.5, ha="center", va="center")


def _draw_ways(axes: Axes, found: Estimate, y: float, *, dashed: bool) -> None:
    above = y + HEIGHT * (1.3 if dashed else 1.0)
    for slot in range(found.cluster.gpus_per_node):
        x = _x(slot, found.plan.tp) + 0.5
        _arrow(axes, (x, above), (x, y + 1.0), PP, style="<|-|>", line=":" if dashed else "-")


def _draw_rings(axes: Axes, tp: int, dp: int, said: str) -> None:
    """Over the first node: the ring of TP ranks of each replica."""
    for replica in range(dp):
        places = [_x(replica * tp + slot, tp) + 0.5 for slot in range(tp)]
        for a, b in itertools.pairwise(places):
            _arrow(axes, (a, 1.0), (b, 1.0), TP, bend=-0.55)
        _arrow(axes, (places[-1], 1.05), (places[0], 1.05), TP, bend=0.3)
        text = f"replica {replica}: ring over tp, {said}"
        axes.text(sum(places) / tp, 1.95, text, color=TP, fontsize=10, ha="center")


def _draw_pair(axes: Axes, tp: int, said: str) -> None:
    """Over the first node: two replicas' ranks that hold the same slice."""
    ends = [_x(slot, tp) + 0.15 for slot in (0, tp)]
    axes.plot(ends, [BRACKET, BRACKET], color=SHARD, lw=1.5)
    for x in ends:
        _arrow(axes, (x, BRACKET), (x, 1.0), SHARD)
    text = f"shard: ranks 0 and {tp}, one of {tp} such pairs in a node, {said}"
    axes.text(ends[0], BRACKET + 0.12, text, color=SHARD, fontsize=10, va="bottom")


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str,
    *,
    style: str = "-|>",
    line: str = "-",
    bend: float = 0.0,
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style,
            connectionstyle=f"arc3,rad={bend}",
            mutation_scale=9,
            color=color,
            linewidth=1.5,
            linestyle=line,
            shrinkA=0,
            shrinkB=0,
            zorder=4,
        )
    )


def _legend(found: Estimate) -> str:
    cluster = found.cluster
    node = cluster.node_link_bytes_per_second / GB
    port = cluster.network_bytes_per_second_per_gpu / GB
    return (
        f"GB: what one rank of stage 1 sends along the axis in a step of {found.batch.sequences:,} "
        f"sequences.\nA GPU sends {node:,.0f} GB/s inside its node, and {port:,.3g} GB/s between nodes."
    )


check_public(globals())
