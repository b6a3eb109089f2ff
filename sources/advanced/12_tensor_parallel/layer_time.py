"""A layer's kernels and its collectives in their order, predicted, their rates, and a picture of them.

Megatron-LM's order with the sequence split has ten collectives. In forward and at the row-parallel
matrices' backward nothing runs beside a collective. Backward of a column-parallel matrix gathers its
input beside the GEMM of the input's gradient, and scatters that gradient beside the GEMM of the
weight's (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
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

__all__ = ["NICS", "Stage", "draw_layer_times", "layer_of_22b", "layer_stages", "rates_in_training"]

# By GPU, the network port that nodes of eight had one of for each: HDR in DGX A100, NDR in DGX H100.
NICS = {"A100 80GB": "InfiniBand HDR", "H100": "InfiniBand NDR"}
PORTS = 8

_PRODUCT, _SLOWED = ("#ffa90e", "//"), ("#ffe3b3", "xx")
_HIDDEN, _WAIT = ("#92dadd", ".."), ("#4d4d4d", "")
_ROW = 1.3  # from one layout to the next


class Stage(NamedTuple):
    """Kernels, a collective, or a collective beside a GEMM.

    Attributes:
        product_seconds: of the GEMMs and, where nothing is sent, of the kernels around them, alone; 0
            where the ranks only send.
        sent_seconds: of the collective alone; 0 where there is none.
        name: "A" of attention's kernels, "F" of feed-forward's; "g" of an all-gather, "s" of a
            reduce-scatter.
        backward: whether it belongs to the backward pass.
    """

    product_seconds: float = 0.0
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
    qkv, up = 3 * h // tp, model.feedforward // tp
    beside = {  # GEMMs of the gradients of the input and of the weight, beside a collective each
        name: [
            Stage(matmul_seconds(gpu, *sizes), sent, kind, backward=True)
            for sizes, kind in (((tokens, h, outputs), "g"), ((h, outputs, tokens), "s"))
        ]
        for name, outputs in (("F", up), ("A", qkv))
    }
    ffn = matmul_seconds(gpu, tokens, up, h) + matmul_seconds(gpu, tokens, h, up)
    down_back = matmul_seconds(gpu, tokens, up, h) + matmul_seconds(gpu, up, h, tokens)
    forward = times.forward.matmul + times.forward.memory - ffn
    other = times.backward.matmul + times.backward.memory - down_back
    back = other - sum(stage.product_seconds for both in beside.values() for stage in both)
    gather, scatter = Stage(0.0, sent, "g"), Stage(0.0, sent, "s")
    stages = [gather, Stage(forward, name="A"), scatter, gather, Stage(ffn, name="F"), scatter]
    for name, first in (("F", down_back), ("A", back)):
        stages.append(gather._replace(backward=True))
        stages += [Stage(first, name=name, backward=True), *beside[name]]
    return stages


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
    links = device(gpu).peer_link, link(NICS[gpu])
    nvlink, port = (bandwidth_in_training(one) / 1e9 for one in links)
    return nvlink, PORTS * port


def draw_layer_times(
    rows: Mapping[str, Sequence[Stage]], contention: float, *, title: str = ""
) -> Figure:
    """Two lanes a row: kernels, slowed by what runs beside them, and collectives.

    Args:
        rows: by name, the stages of a layer in their order.
        contention: share of a collective's seconds that a GEMM beside it loses.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("draw_layer_times() needs one row or more: {'TP 8': layer_stages(...)}.")
    with course_style():
        figure = Figure(figsize=(10, 1.7 + 1.1 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, stages) in enumerate(rows.items()):
            _draw_row(axes, place * _ROW, name, stages, contention)
        lanes = [place * _ROW + lane for place in range(len(rows)) for lane in (0.0, 0.36)]
        axes.set_yticks(lanes, ["kernels", "link"] * len(rows))
        axes.set_ylim(_ROW * (len(rows) - 1) + 0.85, -0.55)
        axes.set_xlabel(
            "milliseconds. A attention, F feed-forward; g all-gather, s reduce-scatter; "
            "dotted: backward begins"
        )
        axes.grid(False, axis="y")
        axes.set_title(title)
        looks = [
            (_PRODUCT, "kernels: GEMMs and all others"),
            (_SLOWED, "time they lose to a collective beside them"),
            (_HIDDEN, "collective beside a GEMM"),
            (_WAIT, "collective that all wait for"),
        ]
        named = [Patch(facecolor=c, hatch=h, label=text) for (c, h), text in looks]
        figure.legend(handles=named, loc="outside lower center", ncols=2, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED], [])
    return figure


def _draw_row(
    axes: Axes, top: float, name: str, stages: Sequence[Stage], contention: float
) -> None:
    start, is_forward = 0.0, True
    for stage in stages:
        if stage.backward and is_forward:
            axes.plot([1e3 * start] * 2, [top - 0.2, top + 0.55], color="black", ls=":", lw=1.2)
            is_forward = False
        slowed = min(
            stage.product_seconds + contention * stage.sent_seconds,
            stage.product_seconds / (1 - contention),
        )
        alone, beside = stage.product_seconds, min(stage.sent_seconds, slowed)
        _bar(axes, top, start, alone, _PRODUCT)
        _bar(axes, top, start + alone, slowed - alone, _SLOWED)
        _bar(axes, top + 0.36, start, beside, _HIDDEN)
        _bar(axes, top + 0.36, start + beside, stage.sent_seconds - beside, _WAIT)
        if stage.name:
            lane, length = (0.64, stage.sent_seconds) if stage.sent_seconds else (0.0, slowed)
            spot = 1e3 * (start + length / 2), top + lane
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if not lane else None
            axes.text(*spot, stage.name, ha="center", va="center", fontsize=8, bbox=box)
        start += max(slowed, stage.sent_seconds)
    told = f"{name}: {1e3 * start:.1f} ms"
    axes.text(0, top - 0.22, told, va="bottom", fontsize=10, fontweight="bold")
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.02e3 * start))


def _bar(axes: Axes, lane: float, start: float, seconds: float, look: tuple[str, str]) -> None:
    if seconds > 0:
        color, hatch = look
        spot = {"left": 1e3 * start, "height": 0.3, "edgecolor": "white", "linewidth": 0.4}
        axes.barh(lane, 1e3 * seconds, color=color, hatch=hatch, **spot)


check_public(globals())
