"""Ranks on nodes, a row a node: who shares a ring of slices, a pair of replicas, a way between stages."""

from __future__ import annotations

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from utils.checked import check_public
from utils.planner import Estimate
from utils.units import GB
from utils.views.rank_map import axis_links
from utils.views.style import course_style, print_evidence

__all__ = ["draw_groups"]

TP, SHARD, PP = "#3f90da", "#832db6", "#bd1f01"  # petroff10, arXiv:2107.02270
FIRST = 3  # nodes drawn at the top; the last one follows
HEIGHT = 2.0  # from node to node, in widths of a GPU


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
    with course_style():
        figure = Figure(figsize=(10.5, 6.2), layout="constrained")
        axes = figure.add_subplot()
        shown = [*range(FIRST), plan.pp - 1]
        rows = {stage: -HEIGHT * (row + (row == FIRST) * 0.35) for row, stage in enumerate(shown)}
        for stage, y in rows.items():
            _draw_node(axes, found, stage, y)
            if stage:
                _draw_ways(axes, found, y, dashed=stage == plan.pp - 1)
        middle = (rows[FIRST - 1] + rows[plan.pp - 1]) / 2 + 0.5
        axes.text(-2.4, middle, f"nodes {FIRST} to {plan.pp - 2}\nalike", fontsize=10, va="center")
        _draw_rings(axes, plan.tp, plan.dp)
        axes.set_xlim(-2.5, per_node + 1.0)
        axes.set_ylim(rows[plan.pp - 1] - 1.3, 3.5)
        axes.set_axis_off()
        axes.set_title(f"{title}: ranks on nodes")
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
        name = f"t{dims.coordinates(rank)['tp']} d{dims.data_rank(rank)}"
        x = _x(slot, found.plan.tp)
        box = Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor="#e8eef4", edgecolor="#717581")
        axes.add_patch(box)
        axes.text(x + 0.5, y + 0.5, name, fontsize=10, ha="center", va="center")


def _draw_ways(axes: Axes, found: Estimate, y: float, *, dashed: bool) -> None:
    above = y + HEIGHT * (1.35 if dashed else 1.0)
    for slot in range(found.cluster.gpus_per_node):
        x = _x(slot, found.plan.tp) + 0.5
        _arrow(axes, (x, above), (x, y + 1.0), PP, style="-|>", line=":" if dashed else "-")


def _draw_rings(axes: Axes, tp: int, dp: int) -> None:
    """Over the first node: one ring of slices for each replica, one group of replicas."""
    for replica in range(dp):
        places = [_x(replica * tp + slot, tp) + 0.5 for slot in range(tp)]
        for a, b in itertools.pairwise(places):
            _arrow(axes, (a, 1.0), (b, 1.0), TP, bend=-0.55)
        _arrow(axes, (places[-1], 1.05), (places[0], 1.05), TP, bend=0.32)
        axes.text(
            sum(places[-2:]) / 2, 2.1, "tp: a ring of slices", color=TP, fontsize=10, ha="center"
        )
    for a, b in itertools.pairwise(range(dp)):
        x, next_x = (_x(replica * tp, tp) + 0.3 for replica in (a, b))
        _arrow(axes, (x, 1.0), (next_x, 1.0), SHARD, style="<|-|>", bend=-0.42)
    middle = (_x(0, tp) + _x((dp - 1) * tp, tp)) / 2 + 0.3
    said = "shard: replicas with the same slice (one group of four is drawn)"
    axes.text(middle, 3.0, said, color=SHARD, fontsize=10, ha="center", va="bottom")


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
    cluster, links = found.cluster, axis_links(found)
    node = cluster.node_link_bytes_per_second / GB
    port = cluster.network_bytes_per_second_per_gpu / GB
    return (
        f"tp: {links['tp']}   shard: {links['dp']}   pp (arrows down): {links['pp']}\n"
        f"in a node {node:,.0f} GB/s a GPU and direction, between nodes {port:,.3g} GB/s"
    )


check_public(globals())
