"""A layer's kernels and its collectives in their order, predicted, their rates, and a picture of them.

With the sequence split, a plan of DTensor has eight collectives a layer: an all-gather before each pair
of matrices and a reduce-scatter after it, forward and backward. Here nothing runs beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evidence.validation.tables import table
from utils.catalog import ModelShape, device, link, model_shape
from utils.checked import check_public
from utils.planner import Batch, Cluster, Plan
from utils.planner.step_seconds.block_time import block_time
from utils.planner.step_seconds.collectives import Group, all_gather_seconds, bandwidth_in_training
from utils.planner.step_seconds.kernels import matmul_seconds
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["NIC", "Stage", "draw_layer_times", "layer_of_22b", "layer_stages", "rates_in_training"]

NIC, PORTS = (
    "InfiniBand HDR",
    8,
)  # the network port of a DGX A100, and how many it has for eight GPUs

_KERNELS, _WAIT = ("#ffa90e", "//"), ("#4d4d4d", "")


class Stage(NamedTuple):
    """Kernels or a collective.

    Attributes:
        kernel_seconds: of GEMMs and the kernels around them; 0 of a collective.
        sent_seconds: of a collective; 0 of kernels.
        name: "A" of attention's kernels, "F" of feed-forward's; "g" of an all-gather, "s" of a
            reduce-scatter.
        backward: whether it belongs to the backward pass.
    """

    kernel_seconds: float = 0.0
    sent_seconds: float = 0.0
    name: str = ""
    backward: bool = False


def layer_stages(model: ModelShape, cluster: Cluster, tp: int, tokens: int) -> list[Stage]:
    """A GPT layer, forward and backward, of one micro-batch on one of `tp` ranks.

    Args:
        model: a GPT: four matrices a layer, as many key-value heads as heads.
        cluster: where the ranks stand.
        tp: ranks that share each matrix and the sequence.
        tokens: of the micro-batch, one sequence.
    """
    h, gpu = model.hidden, cluster.device
    plan = Plan(tp=tp, dp=cluster.gpus // tp, sequence_parallel=True)
    times = block_time(model, cluster, plan, Batch(sequences=plan.dp, sequence_length=tokens))
    sent = all_gather_seconds(cluster, Group(tp), 2 * tokens * h)
    up = model.feedforward // tp
    ffn = matmul_seconds(gpu, tokens, up, h) + matmul_seconds(gpu, tokens, h, up)
    ffn_back = ffn + matmul_seconds(gpu, up, h, tokens) + matmul_seconds(gpu, h, up, tokens)
    passes = {  # the pairs of matrices in their order
        False: {"A": times.forward.matmul + times.forward.memory - ffn, "F": ffn},
        True: {"F": ffn_back, "A": times.backward.matmul + times.backward.memory - ffn_back},
    }
    gather, scatter = Stage(0.0, sent, "g"), Stage(0.0, sent, "s")
    return [
        stage._replace(backward=backward)
        for backward, pairs in passes.items()
        for name, kernels in pairs.items()
        for stage in (gather, Stage(kernels, name=name), scatter)
    ]


def layer_of_22b(cluster: Cluster) -> tuple[float, float]:
    """Milliseconds of a layer of 22B on eight ranks with the sequence split: predicted, published.

    Korthikanti et al. 2022, Table 4: micro-batches of four sequences, scores and dropout kept. The
    fitted constants were not set on it, but on their Table 5: whole steps, of this model too.
    """
    plan = Plan(
        tp=8, dp=cluster.gpus // 8, micro_batch=4, sequence_parallel=True,
        attention="unfused", dropout=True,
    )  # fmt: skip
    batch = Batch(sequences=4 * plan.dp, sequence_length=2048)
    predicted = 1e3 * block_time(model_shape("megatron-22b"), cluster, plan, batch).total
    rows = {row["experiment"]: float(row["combined_ms"]) for row in table("korthikanti_table4")}
    return predicted, rows["sequence parallelism"]


def rates_in_training() -> tuple[float, float]:
    """GB/s a direction in a training step: an A100's NVLink, and all ports of its node together."""
    gpu = "A100 80GB"
    links = device(gpu).peer_link, link(NIC)
    nvlink, port = (bandwidth_in_training(one) / 1e9 for one in links)
    return nvlink, PORTS * port


def draw_layer_times(rows: Mapping[str, Sequence[Stage]], *, title: str = "") -> Figure:
    """A lane a row: kernels and collectives, one after another.

    Args:
        rows: by name, the stages of a layer in their order.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("draw_layer_times() needs one row or more: {'TP 8': layer_stages(...)}.")
    with course_style():
        figure = Figure(figsize=(10, 1.7 + 0.7 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, stages) in enumerate(rows.items()):
            _draw_row(axes, place, name, stages)
        axes.set_yticks([])
        axes.set_ylim(len(rows) - 0.6, -0.6)
        axes.set_xlabel(
            "milliseconds on each rank. A attention, F feed-forward; thin line: backward begins"
        )
        axes.grid(False, axis="y")
        axes.set_title(title)
        looks = [(_KERNELS, "kernels"), (_WAIT, "collective: the ranks wait")]
        named = [Patch(facecolor=c, hatch=h, label=text) for (c, h), text in looks]
        figure.legend(handles=named, loc="outside lower center", ncols=2, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED], [])
    return figure


def _draw_row(axes: Axes, lane: float, name: str, stages: Sequence[Stage]) -> None:
    start, is_forward = 0.0, True
    for stage in stages:
        if stage.backward and is_forward:
            axes.plot([1e3 * start] * 2, [lane - 0.17, lane + 0.32], color="black", lw=1.2)
            is_forward = False
        _bar(axes, lane, start, stage.kernel_seconds, _KERNELS)
        _bar(axes, lane, start, stage.sent_seconds, _WAIT)
        if stage.kernel_seconds:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            spot = 1e3 * (start + stage.kernel_seconds / 2), lane
            axes.text(*spot, stage.name, ha="center", va="center", fontsize=8, bbox=box)
        start += stage.kernel_seconds + stage.sent_seconds
    told = f"{name}: {1e3 * start:.1f} ms"
    axes.text(0, lane - 0.2, told, va="bottom", fontsize=10, fontweight="bold")
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.02e3 * start))


def _bar(axes: Axes, lane: float, start: float, seconds: float, look: tuple[str, str]) -> None:
    if seconds > 0:
        color, hatch = look
        spot = {"left": 1e3 * start, "height": 0.3, "edgecolor": "white", "linewidth": 0.4}
        axes.barh(lane, 1e3 * seconds, color=color, hatch=hatch, **spot)


check_public(globals())
