"""A layer's products and its ten collectives in their order, predicted, and a picture of them.

The order is Megatron-LM's with the sequence split. In forward and at the row-parallel matrices'
backward nothing runs beside a collective. Backward of a column-parallel matrix gathers its input
beside the product of the input's gradient, and scatters that gradient beside the product of the
weight's (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.catalog import ModelShape
from utils.checked import check_public
from utils.planner import Batch, Cluster, Plan
from utils.planner.step_time.block_time import block_time
from utils.planner.step_time.collectives import Group, all_gather_seconds
from utils.planner.step_time.kernels import matmul_seconds
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["Stage", "draw_layer_times", "layer_stages"]

_PRODUCT, _HIDDEN, _WAIT = ("#ffa90e", "//"), ("#92dadd", ".."), ("#4d4d4d", "")


class Stage(NamedTuple):
    """Products, a collective, or a collective beside a product.

    Attributes:
        product_seconds: of the products alone; 0 where the ranks only send.
        sent_seconds: of the collective alone; 0 where there is none.
    """

    product_seconds: float = 0.0
    sent_seconds: float = 0.0


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
    sends = Stage(sent_seconds=all_gather_seconds(cluster, Group(tp), 2 * tokens * h))
    qkv, up = 3 * h // tp, model.feedforward // tp
    beside = [  # (to the input, to the weight) of A, then of queries, keys and values
        Stage(matmul_seconds(gpu, *sizes), sends.sent_seconds)
        for outputs in (up, qkv)
        for sizes in ((tokens, h, outputs), (h, outputs, tokens))
    ]
    ffn = matmul_seconds(gpu, tokens, up, h) + matmul_seconds(gpu, tokens, h, up)
    down_back = matmul_seconds(gpu, tokens, up, h) + matmul_seconds(gpu, up, h, tokens)
    forward = times.forward.matmul + times.forward.memory - ffn
    other = times.backward.matmul + times.backward.memory - down_back
    back = other - sum(stage.product_seconds for stage in beside)
    return [
        *(sends, Stage(forward), sends, sends, Stage(ffn), sends),
        *(sends, Stage(down_back), *beside[:2], sends, Stage(back), *beside[2:]),
    ]


def draw_layer_times(
    rows: Mapping[str, Sequence[Stage]], contention: float, *, title: str = ""
) -> Figure:
    """Two lanes a row: products, slowed by what runs beside them, and collectives.

    Args:
        rows: by name, the stages of a layer in their order.
        contention: share of a collective's seconds that a product beside it loses.

    Raises:
        ValueError: no row.
    """
    if not rows:
        raise ValueError("draw_layer_times() needs one row or more: {'TP 8': layer_stages(...)}.")
    with course_style():
        figure = Figure(figsize=(10, 1.4 + 1.25 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for row, stages in enumerate(rows.values()):
            _draw_row(axes, row, stages, contention)
        axes.set_yticks(
            [row + lane for row in range(len(rows)) for lane in (0.0, 0.36)],
            [text for name in rows for text in (f"{name}: products", "link")],
        )
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds of one layer, forward and backward")
        axes.grid(False, axis="y")
        axes.set_title(title)
        looks = [
            (_PRODUCT, "products and other kernels"),
            (_HIDDEN, "collective beside a product"),
            (_WAIT, "collective that all wait for"),
        ]
        named = [Patch(facecolor=c, hatch=h, label=text) for (c, h), text in looks]
        figure.legend(handles=named, loc="outside lower center", ncols=3, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED], [])
    return figure


def _draw_row(axes: Axes, row: int, stages: Sequence[Stage], contention: float) -> None:
    start = 0.0
    for stage in stages:
        product = min(
            stage.product_seconds + contention * stage.sent_seconds,
            stage.product_seconds / (1 - contention),
        )
        beside = min(stage.sent_seconds, product)
        bars = [
            (0.0, 0.0, product, _PRODUCT),
            (0.36, 0.0, beside, _HIDDEN),
            (0.36, beside, stage.sent_seconds - beside, _WAIT),
        ]
        for lane, offset, seconds, (color, hatch) in bars:
            if seconds > 0:
                axes.barh(
                    row + lane,
                    1e3 * seconds,
                    left=1e3 * (start + offset),
                    height=0.3,
                    color=color,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0.4,
                )
        start += max(product, stage.sent_seconds)
    axes.text(1e3 * start, row + 0.18, f"  {1e3 * start:.1f} ms", va="center", fontsize=10)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.12e3 * start))


check_public(globals())
