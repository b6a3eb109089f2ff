"""NVIDIA's rates of Llama 3 in fp8: Megatron-Bridge's performance recipes, H100 to GB300.

The table has ranks and batches; what it leaves out is in the recipes of the same release
(scripts/performance/configs/llama*, v0.2.0 to v0.5.0; src/megatron/bridge/perf_recipes at 067f987).
"""

from __future__ import annotations

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape, model_shape
from utils.planner import Batch, Cluster, Plan, memory, worst
from utils.planner.flops import model_flops
from utils.planner.step_seconds import step_time
from utils.units import GB

SOURCE = "Megatron-Bridge, Llama in fp8"
MODELS = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3.1-405b"}
SEQUENCE_LENGTH = 8192
# One NVLink domain of a rack; its nodes are what a job's GPUs are dealt to in whole racks.
RACK = 64
PORT = 50 * GB  # InfiniBand NDR, one a GPU


def comparisons() -> list[Comparison]:
    """Tokens per second and GPU, of pretraining."""
    rows = []
    for line, row in enumerate(table("megatron_bridge")):
        model, cluster, plan, batch = setup(row)
        rate = batch.tokens / step_time(model, cluster, plan, batch).total / cluster.gpus
        size = batch.tokens / model_flops(model, batch)
        size *= cluster.device.peak_flops_per_second("fp8")
        rows.append(
            Comparison(
                SOURCE,
                "tokens/s/GPU",
                case(row),
                float(row["tok_s_gpu"]),
                rate,
                size,
                line % 2 == 0,
            )
        )
    return rows


def fit_verdicts() -> list[tuple[str, bool]]:
    """(row, we say that it fits); all of them ran."""
    found = []
    for row in table("megatron_bridge"):
        model, cluster, plan, batch = setup(row)
        found.append((case(row), worst(memory(model, plan, batch)).fits(cluster.device)))
    return found


def setup(row: dict[str, str]) -> tuple[ModelShape, Cluster, Plan, Batch]:
    """Model, cluster, plan and batch of one row."""
    gpus, tp, pp, cp = (whole(row[name]) for name in ("n_gpus", "tp", "pp", "cp"))
    node = min(gpus, RACK if row["gpu"].startswith("GB") else 8)
    cluster = Cluster(
        gpu=row["gpu"],
        nodes=gpus // node,
        gpus_per_node=node,
        network_bytes_per_second=node * PORT,
        network_ports=node,
    )
    recomputed = whole(row["recompute_layers"], 0) or None
    offloaded = whole(row["offload_layers"], 0) or None
    plan = Plan(
        dp=gpus // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        virtual_stages=whole(row["vp"]),
        sequence_parallel=tp > 1,
        overlap_tp=tp > 1,
        micro_batch=whole(row["mbs"]),
        zero_stage=3 if row["fsdp"] == "1" else 1,
        precision=row["precision"],
        loss="fused",
        partition="ends" if row["model"] == "405B" and pp > 1 else "even",
        recompute="full" if recomputed else "none",
        recompute_layers=recomputed,
        offload_activations=offloaded is not None,
        offload_layers=offloaded,
        framework="megatron-bridge",
    )
    batch = Batch(sequences=whole(row["gbs"]), sequence_length=SEQUENCE_LENGTH)
    return model_shape(MODELS[row["model"]]), cluster, plan, batch


def case(row: dict[str, str]) -> str:
    """A row's name."""
    return f"{row['release']} {row['model']} {row['precision']} on {row['n_gpus']} {row['gpu']}"
