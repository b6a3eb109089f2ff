"""Iteration times of Megatron-LM on Selene: Korthikanti's Table 5, Narayanan's Table 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evidence.validation.comparison import Comparison
from evidence.validation.states import korthikanti_plan
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape, model_shape
from utils.planner import Batch, Cluster, Plan, estimate, framework, memory, worst
from utils.planner.flops import hardware_flops, model_flops
from utils.units import GB

NAMES = {"22": "22B", "175": "175B", "530": "530B", "1000": "1T"}
MODELS = {
    "22": "megatron-22b",
    "175": "megatron-175b",
    "530": "megatron-530b",
    "1000": "megatron-1t",
}


def selene(gpus: int) -> Cluster:
    """DGX A100 with 8 ports of InfiniBand HDR a node (Narayanan et al. 2021, section 5)."""
    return Cluster(gpu="A100-80GB", nodes=gpus // 8, network_bytes_per_second=8 * 25 * GB)


def korthikanti_comparisons() -> list[Comparison]:
    """Seconds of an iteration, with full recomputation and with the paper's two techniques."""
    rows = []
    for row in table("korthikanti_table5"):
        model = model_shape(MODELS[row["params_b"]])
        batch = Batch(sequences=whole(row["global_batch"]), sequence_length=2048)
        size = model_flops(model, batch) / whole(row["n_gpus"])
        for column, optimized in (("full_recompute", False), ("seqpar_selective", True)):
            plan = korthikanti_plan(NAMES[row["params_b"]], optimized)
            if not optimized:
                plan = replace(plan, recompute="full")
            seconds = estimate(model, selene(plan.ranks), plan, batch).step_seconds
            rows.append(
                Comparison(
                    "Korthikanti Table 5",
                    "seconds",
                    f"{NAMES[row['params_b']]} {column}",
                    float(row[f"iter_s_{column}"]),
                    seconds,
                    size,
                    fitted=True,
                )
            )
    return rows


@dataclass(frozen=True)
class Table2Row:
    """One row of Narayanan's Table 2.

    Attributes:
        scheme: "PTD" (tensor, pipeline and data parallel) or "ZeRO-3".
        parameters_b: Billions of parameters.
        gpus: How many.
        published, predicted: TFLOP/s of a GPU, recomputation counted.
        fits: We say that the plan fits.
    """

    scheme: str
    parameters_b: float
    gpus: int
    published: float
    predicted: float
    fits: bool


def narayanan_table_2() -> list[Table2Row]:
    """Both schemes at every size."""
    rows = []
    for row in table("narayanan_table2"):
        model, plan, batch = _table_2_setup(row)
        gpus = whole(row["n_gpus"])
        found = estimate(model, selene(gpus), plan, batch)
        rate = hardware_flops(model, plan, batch) / found.step_seconds / gpus / 1e12
        published = float(row["tflops_per_gpu_incl_recompute"])
        rows.append(
            Table2Row(row["scheme"], float(row["params_b"]), gpus, published, rate, found.fits)
        )
    return rows


def _table_2_setup(row: dict[str, str]) -> tuple[ModelShape, Plan, Batch]:
    model = model_shape("megatron-175b" if row["params_b"] == "174.6" else "megatron-530b")
    gpus, split = whole(row["n_gpus"]), whole(row["model_parallel_size"])
    kept = {
        "attention": "unfused",
        "dropout": True,
        "recompute": "full",
        "micro_batch": whole(row["microbatch"]),
    }
    if row["scheme"] == "ZeRO-3":
        rules = replace(framework("deepspeed"), fused_gate=True)
        plan = Plan(dp=gpus, zero_stage=3, framework=rules, **kept)
    else:
        plan = Plan(dp=gpus // split, tp=8, pp=split // 8, framework="megatron", **kept)
    return model, plan, Batch(sequences=whole(row["batch"]), sequence_length=2048)


def zero_3_at_530b_on_560_gpus_fits() -> bool:
    """Micro-batch 4, which did not fit when they tried."""
    plan = Plan(
        dp=560,
        zero_stage=3,
        micro_batch=4,
        recompute="full",
        attention="unfused",
        dropout=True,
        framework="deepspeed",
    )
    batch = Batch(sequences=2240, sequence_length=2048)
    return worst(memory(model_shape("megatron-530b"), plan, batch)).fits(selene(560).device)
