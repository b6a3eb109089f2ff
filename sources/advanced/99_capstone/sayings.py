"""Numbers that are true of one thing and are quoted for another, and by what factor that misleads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from evidence.validation.tables import table
from utils.catalog import device, model_shape
from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.planner.flops import hardware_flops, model_flops
from utils.units import GB, Category, Evidence
from utils.views.style import LOOKS, course_style, empty_figure, print_evidence


class Saying(NamedTuple):
    """A number that is quoted for something, the right one in the same unit, and what the first is of."""

    name: str
    said: float
    right: float
    unit: str
    evidence: Evidence
    true_of: str = ""

    @property
    def factor(self) -> float:
        """How many times too large; below 1 where too small."""
        return self.said / self.right

    @property
    def off(self) -> float:
        """How many times off, in either direction."""
        return max(self.factor, 1 / self.factor)


def seven_numbers() -> list[Saying]:
    """What is quoted, from the sources in its last column; what is right, published or predicted."""
    a100, states = device("A100-80GB"), 175e9 / 64 / GB
    nvlink = a100.gpu_link.link_bytes_per_second / GB if a100.gpu_link else 0.0
    counted = _trillion_hfu_percent()
    rows = [
        ("A100: NVLink in one direction", 600, nvlink, "GB/s", "both directions added (data sheet)"),
        ("A100: fastest bf16 matrix product", 312, a100.matmul_ceiling_tflops, "TFLOP/s",
         "the data sheet's peak"),
        ("A layer of 22B: time that full recomputation adds", 33, _recompute_percent(), "%",
         "FLOP of one more forward pass"),
    ]  # fmt: skip
    predicted = [
        ("1T on 3,072 A100: MFU", counted, _trillion_mfu_percent(counted), "%",
         "FLOP with recomputation (Narayanan et al. 2021)"),
        ("1.3B, ZeRO-3 on 4 ranks, 1,024 tokens each: peak", 16 * 1.3158e9 / 4 / GB, _zero_3_peak_gb(), "GB",
         "states alone, 16P/N (ZeRO paper)"),
        ("7B, QLoRA, rank 8, 2,048 tokens: peak", 3.5, _qlora_peak_gb(), "GB",
         "7.0B weights alone, at 4 bits each"),
        ("175B, Megatron-LM on 64 GPUs: states a GPU, mean", 2 * states, 18 * states, "GB",
         "weights alone, in bf16"),
    ]  # fmt: skip
    return [
        Saying(name, said, float(right or 0), unit, evidence, true_of)
        for evidence, group in ((Evidence.PUBLISHED, rows), (Evidence.PREDICTED, predicted))
        for name, said, right, unit, true_of in group
    ]


def _trillion_hfu_percent() -> float:
    row = next(row for row in table("narayanan_table1") if float(row["params_b"]) > 1000)
    return 100 * float(row["tflops_per_gpu_incl_recompute"]) / 312


def _trillion_mfu_percent(counted_percent: float) -> float:
    model, batch = model_shape("megatron-1t"), Batch(sequences=3072, sequence_length=2048)
    plan = Plan(recompute="full", attention="unfused")
    return counted_percent * model_flops(model, batch) / hardware_flops(model, plan, batch)


def _recompute_percent() -> float:
    rows = table("korthikanti_table4")
    full = next(row for row in rows if row["experiment"] == "baseline with full recompute")
    return float(full["overhead_pct"])


def _zero_3_peak_gb() -> float:
    cluster = Cluster(gpu="V100-32GB", nodes=1, gpus_per_node=4)
    plan = Plan(dp=4, zero_stage=3, framework="deepspeed")
    found = estimate("opt-1.3b", cluster, plan, Batch(sequences=4, sequence_length=1024))
    return found.peak.allocated_bytes / GB


def _qlora_peak_gb() -> float:
    cluster = Cluster(gpu="A100-80GB", nodes=1, gpus_per_node=1)
    plan = Plan(lora=Lora(rank=8, base="nf4-dq"))
    found = estimate("llama-2-7b", cluster, plan, Batch(sequences=1, sequence_length=2048))
    return found.peak.allocated_bytes / GB


def draw_sayings(sayings: Sequence[Saying], *, title: str = "Said over right") -> Figure:
    """One line a saying, from 1 to how many times it is off, the worst on top.

    Args:
        sayings: One or more, each above zero.
        title: Of the figure.

    Raises:
        ValueError: none, or a number that no ratio can be made of.
    """
    if not sayings or any(not (row.said > 0 and row.right > 0) for row in sayings):
        raise ValueError("Sayings need numbers above zero: what is said, and what is right.")
    rows = sorted(sayings, key=lambda row: row.off)
    with course_style():
        figure, axes = empty_figure(11.0, 1.1 + 0.62 * len(rows))
        for place, row in enumerate(rows):
            large = row.factor > 1
            color = LOOKS[Category.ACTIVATIONS if large else Category.PARAMETERS].color
            axes.plot([1, row.off], [place, place], color=color, lw=2.5, zorder=1)
            marker = "o" if large else "s"
            axes.scatter([row.off], [place], color=color, marker=marker, s=60, zorder=2)
            told = f"said {_short(row.said)}, right {_short(row.right)} {row.unit} ({row.evidence})"
            axes.annotate(
                told,
                (row.off, place),
                (10, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
            )
        most = rows[-1].off
        axes.set_xlim(1, 1 + (most - 1) * 1.95)
        axes.set_xticks(range(1, int(most) + 1))
        axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("how many times off (circle: said is too large; square: too small)")
        axes.set_title(title)
        print_evidence(figure, [row.evidence for row in rows])
    return figure


def _label(row: Saying) -> str:
    return f"{row.name}\nis true of: {row.true_of}" if row.true_of else row.name


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
