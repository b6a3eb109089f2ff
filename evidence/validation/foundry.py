"""llm-foundry's benchmarks: MPT under FSDP, the largest micro-batches that fitted."""

from __future__ import annotations

from dataclasses import replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape
from utils.planner import Batch, Cluster, Plan, memory, worst
from utils.planner.flops import model_flops
from utils.planner.frameworks import framework
from utils.planner.step_seconds import step_time
from utils.units import GB

# llm-foundry's scripts/train/yamls/pretrain: layers, width, heads; vocabulary 50,368.
SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
GPUS = {"a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB", "h100_80gb": "H100"}

# Its loss is flash-attn's fused cross-entropy, which writes the gradient over the 16-bit logits.
# Its attention is the first FlashAttention, in Triton (submit_benchmarks.py, --attn_impl triton).
RULES = replace(framework("fsdp"), name="llm-foundry", loss_bytes=4, flash_generation=1)
# Rows of after PyTorch 2.1, whose checkpoint stops early: submit_benchmarks.py names 1.13 for A100.
LATE = ("h100_80gb",)
# Network ports of a node: 1,600 Gb/s with A100, 3,200 with H100 (the README's headings).
NETWORK = {"a100_80gb": 200 * GB, "a100_40gb": 200 * GB, "h100_80gb": 400 * GB}


def lines() -> list[tuple[int, dict[str, str]]]:
    """Line number and row of those that compute in bfloat16."""
    return [(i, row) for i, row in enumerate(table("llm_foundry")) if "fp8" not in row["precision"]]


def comparisons() -> list[Comparison]:
    """Model FLOP utilization, in percent of peak."""
    rows = []
    for line, row in lines():
        model, cluster, plan, batch = setup(row)
        seconds = step_time(model, cluster, plan, batch).total
        peak = cluster.gpus * cluster.device.peak_flops_per_second("bf16")
        mfu = 100 * model_flops(model, batch) / seconds / peak
        published = float(row["mfu_pct"])
        source = f"llm-foundry, {GPUS[row['gpu']].split('-')[0]}"
        rows.append(Comparison(source, "MFU %", case(row), published, mfu, 1.0, line % 2 == 0))
    return rows


def fit_verdicts() -> list[tuple[str, bool]]:
    """(row, we say that it fits); all of them did."""
    verdicts = []
    for _, row in lines():
        model, cluster, plan, batch = setup(row)
        verdicts.append((case(row), worst(memory(model, plan, batch)).fits(cluster.device)))
    return verdicts


def setup(row: dict[str, str]) -> tuple[ModelShape, Cluster, Plan, Batch]:
    """Model, cluster (1,600 Gb/s a node), plan and batch of one row."""
    layers, hidden, heads = SIZES[row["model"]]
    length, gpus = whole(row["seq_len"]), whole(row["n_gpus"])
    model = ModelShape(
        name=f"mpt-{row['model']}",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        feedforward=4 * hidden,
        vocabulary=50_368,
        max_sequence=length,
        positions="learned",
        tied=True,
    )
    gpu = row["gpu"]
    cluster = Cluster(gpu=GPUS[gpu], nodes=gpus // 8, network_bytes_per_second=NETWORK[gpu])
    rules = replace(
        RULES, reduce_bytes=2 if row["mp_mode"] == "PURE" else 4, recompute_stops_early=gpu in LATE
    )
    plan = Plan(
        dp=gpus,
        zero_stage=3,
        micro_batch=whole(row["micro_batch_size"]),
        recompute="full" if row["activation_checkpointing"] == "True" else "none",
        framework=rules,
    )
    sequences = gpus * plan.micro_batch * whole(row["grad_accum"])
    return model, cluster, plan, Batch(sequences=sequences, sequence_length=length)


def case(row: dict[str, str]) -> str:
    """A row's name."""
    return (
        f"{row['model']} s{row['seq_len']} x{row['n_gpus']} {row['gpu']} "
        f"mbs{row['micro_batch_size']} x{row['grad_accum']}"
    )
