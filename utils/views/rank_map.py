"""Ranks on nodes: which stage and which slice lies on which GPU, and over which link each axis talks."""

from __future__ import annotations

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path

from utils.planner import Estimate, plan_name
from utils.planner.step_seconds.collectives import hops_across_nodes
from utils.units import GB
from utils.views.style import course_style, print_evidence

MOST_NODES = 8
GAP = 0.35  # between nodes, in widths of a GPU
STAGE_COLORS = "viridis"
NEAR, FAR = "#717581", "#bd1f01"


def axis_links(found: Estimate) -> dict[str, str]:
    """What each axis of the plan talks over: "the node's link", "the network", or some of both."""
    plan, per_node = found.plan, found.cluster.gpus_per_node
    strides = {"tp": (1, plan.tp), "cp": (plan.tp, plan.cp), "dp": (plan.tp * plan.cp, plan.dp)}
    words = {}
    if plan.ep > 1:
        strides["ep"] = (plan.tp if plan.expert_tp is None else plan.expert_tp, plan.ep)
    for axis, (stride, size) in strides.items():
        if size > 1:
            words[axis] = _ring_words(stride, size, per_node)
    if plan.pp > 1:
        hops = hops_across_nodes(per_node, plan.tp * plan.cp * plan.dp, plan.pp)[:-1]
        far = sum(hops)
        words["pp"] = f"{len(hops) - far} hops in a node, {far} over the network"
    return words


def _ring_words(stride: int, size: int, per_node: int) -> str:
    if stride * size <= per_node:
        return "inside a node"
    return "over the network" if stride >= per_node else "inside a node and over the network"


def draw_ranks(found: Estimate, *, title: str = "") -> Figure:
    """Every GPU of the first nodes with its stage and tensor-parallel slice, and each axis's link.

    Stages are colours. Grey arrows between stages stay inside a node, red ones leave it. Without a
    title it is the plan's short name.
    """
    cluster = found.cluster
    nodes = min(cluster.nodes, MOST_NODES)
    across = min(4, nodes)
    down = -(-nodes // across)
    with course_style():
        figure = Figure(figsize=(10.5, 1.9 + 1.55 * down), layout="constrained")
        axes = figure.add_subplot()
        per_node = cluster.gpus_per_node
        places = {rank: _place(rank, per_node, across) for rank in range(nodes * per_node)}
        for node in range(nodes):
            _draw_node(axes, node, cluster.gpus_per_node, across)
        for rank, (x, y) in places.items():
            _draw_gpu(axes, found, rank, x, y)
        _draw_hops(axes, found, places)
        width = cluster.gpus_per_node / 2 + GAP
        axes.set_xlim(-0.35, across * width)
        axes.set_ylim(-down * (2 + 2 * GAP) + 0.1, 0.75)
        axes.set_aspect("equal")
        axes.set_axis_off()
        shown = "" if nodes == cluster.nodes else f" (the first {nodes} of {cluster.nodes} nodes)"
        axes.set_title(f"{title or plan_name(found)}: ranks on nodes{shown}")
        figure.text(0.01, 0.01, _legend(found), fontsize=10, va="bottom")
        print_evidence(figure, [found.evidence])
    return figure


def _place(rank: int, per_node: int, across: int) -> tuple[float, float]:
    """Lower left corner of a rank's square: two rows of GPUs in each node."""
    node, local = divmod(rank, per_node)
    columns = -(-per_node // 2)
    row, column = divmod(local, columns)
    x = (node % across) * (columns + GAP) + column
    y = -(node // across) * (2 + 2 * GAP) - row - 1
    return x, y


def _draw_node(axes: Axes, node: int, per_node: int, across: int) -> None:
    x, y = _place(node * per_node, per_node, across)
    columns = -(-per_node // 2)
    axes.add_patch(
        Rectangle(
            (x - 0.08, y - 1.08),
            columns + 0.16,
            2.16,
            facecolor="none",
            edgecolor="black",
            linewidth=1.2,
        )
    )
    axes.text(x, y + 1.13, f"node {node}", fontsize=9, va="bottom")


def _draw_gpu(axes: Axes, found: Estimate, rank: int, x: float, y: float) -> None:
    plan = found.plan
    stage, inside = divmod(rank, plan.tp * plan.cp * plan.dp)
    replica, slice_ = divmod(inside, plan.tp)
    color = colormaps[STAGE_COLORS](0.15 + 0.8 * stage / max(1, plan.pp - 1))
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=color, edgecolor="white"))
    dark = sum(color[:3]) < 1.5
    lines = [f"s{stage}" if plan.pp > 1 else "", f"t{slice_}" if plan.tp > 1 else ""]
    lines += [f"d{replica}"] if plan.dp * plan.cp > 1 else []
    axes.text(
        x + 0.5,
        y + 0.5,
        "\n".join(filter(None, lines)),
        ha="center",
        va="center",
        fontsize=8,
        color="white" if dark else "black",
    )


def _draw_hops(axes: Axes, found: Estimate, places: dict[int, tuple[float, float]]) -> None:
    """An arrow from each stage's last rank to the next one's first."""
    plan, stride = found.plan, found.plan.tp * found.plan.cp * found.plan.dp
    hops = hops_across_nodes(found.cluster.gpus_per_node, stride, plan.pp) if plan.pp > 1 else ()
    for stage, leaves in enumerate(hops[:-1]):
        start, end = places.get((stage + 1) * stride - 1), places.get((stage + 1) * stride)
        if start is not None and end is not None:
            color, width = (FAR, 1.8) if leaves else (NEAR, 1.4)
            axes.add_patch(
                FancyArrowPatch(
                    path=_way(start, end),
                    arrowstyle="-|>",
                    mutation_scale=9,
                    color=color,
                    linewidth=width,
                    fill=False,
                    zorder=4,
                )
            )


def _way(start: tuple[float, float], end: tuple[float, float]) -> Path:
    """From the right edge of one square to the left edge of another, below the rows between them."""
    (x0, y0), (x1, y1) = start, end
    if x1 > x0:
        return Path([(x0 + 0.9, y0 + 0.5), (x1 + 0.1, y1 + 0.5)])
    below = y0 if abs(y0 - y1) < 1.5 else y0 - GAP / 2
    points = [
        (x0 + 0.9, y0 + 0.5),
        (x0 + 1.05, y0 + 0.5),
        (x0 + 1.05, below),
        (x1 - 0.05, below),
        (x1 - 0.05, y1 + 0.5),
        (x1 + 0.1, y1 + 0.5),
    ]
    return Path(points)


def _legend(found: Estimate) -> str:
    cluster = found.cluster
    node = cluster.node_link_bytes_per_second / GB
    port = cluster.network_bytes_per_second_per_gpu / GB
    names = {"tp": "TP (t)", "cp": "CP", "dp": "DP (d)", "ep": "EP", "pp": "PP (s)"}
    said = [f"{names[axis]}: {words}" for axis, words in axis_links(found).items()]
    links = f"in a node {node:,.0f} GB/s a GPU and direction, between nodes {port:,.3g} GB/s"
    arrows = "an arrow stands for a whole stage: each GPU sends to its own t (and d) of the next"
    staged = f"\n{arrows}" if found.plan.pp > 1 else ""
    return "   ".join(said) + f"\n{links}; red arrows leave a node{staged}"
