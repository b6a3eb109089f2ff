"""Megatron-LM on eight B200, measured by SimuMax's authors, with their own tool's predictions."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape, model_shape
from utils.planner import Batch, Cluster, Plan, framework, memory, worst
from utils.planner.flops import model_flops
from utils.planner.step_seconds import step_time
from utils.units import GIB

MODELS = {"llama3-70b": "llama-3-70b", "llama3-405b": "llama-3.1-405b"}
SEQUENCE_LENGTH = 4096  # where the case names no other

# simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh: distributed optimizer, neither
# --overlap-grad-reduce nor --overlap-param-gather, and every overlap of tensor-parallel collectives
# disabled; "cef" is the fused cross-entropy, which writes the gradient over the 16-bit logits.
RULES = replace(
    framework("megatron"),
    name="megatron-b200",
    overlap_gradients=False,
    overlap_parameters=False,
    overlap_tensor=False,
    loss_bytes=4,
)


def rows() -> list[tuple[int, dict[str, str]]]:
    """Line number and row of the dense cases."""
    found = enumerate(table("simumax_b200"))
    return [(line, row) for line, row in found if row["model"] in MODELS]


def seconds_comparisons() -> list[Comparison]:
    """Milliseconds of an iteration."""
    found = []
    for line, row in rows():
        model, cluster, plan, batch = setup(row)
        milliseconds = 1e3 * step_time(model, cluster, plan, batch).total
        size = model_flops(model, batch)
        published = float(row["real_ms"])
        found.append(
            Comparison(
                "SimuMax's B200",
                "milliseconds",
                row["case"],
                published,
                milliseconds,
                size,
                line % 2 == 0,
            )
        )
    return found


def memory_comparisons() -> list[Comparison]:
    """Allocated GiB at the peak, of the fullest rank."""
    found = []
    for _line, row in rows():
        model, _cluster, plan, batch = setup(row)
        held = worst(memory(model, plan, batch))
        found.append(
            Comparison(
                "SimuMax's B200",
                "allocated GiB",
                row["case"],
                float(row["real_alloc_gib"]),
                held.allocated_bytes / GIB,
                held.parameters,
            )
        )
    return found


def simumax_errors() -> tuple[float, float]:
    """Mean absolute errors of SimuMax's own predictions, seconds and bytes, on the same rows."""
    pairs = (("simumax_ms", "real_ms"), ("simumax_alloc_gib", "real_alloc_gib"))
    found = [
        statistics.fmean(abs(float(row[said]) / float(row[was]) - 1) for _, row in rows())
        for said, was in pairs
    ]
    return found[0], found[1]


def setup(row: dict[str, str]) -> tuple[ModelShape, Cluster, Plan, Batch]:
    """Model (its layers cut), node, plan and batch of one row."""
    ranks = dict(re.findall(r"(tp|cp|pp)(\d+)", row["parallel"]))
    tp, cp, pp = (whole(ranks.get(axis, "")) for axis in ("tp", "cp", "pp"))
    dp = 8 // (tp * cp * pp)
    named = re.search(r"seq(\d+)", row["case"])
    length = int(named[1]) if named else SEQUENCE_LENGTH
    model = replace(model_shape(MODELS[row["model"]]), layers=whole(row["layer_num"]))
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        zero_stage=1 if dp * cp > 1 else 0,
        sequence_parallel=tp > 1,
        framework=RULES,
    )
    batch = Batch(sequences=dp * whole(row["mbc"]), sequence_length=length)
    return model, Cluster(gpu="B200", nodes=1), plan, batch
