"""Published steps by number of GPUs: ZeRO-1 whole and in groups, HSDP, and Megatron-LM's baseline.

No constant was set on any of these rows.
"""

from __future__ import annotations

from dataclasses import replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape, model_shape
from utils.planner import Batch, Cluster, Plan, framework
from utils.planner.flops import model_flops
from utils.planner.step_seconds import step_time
from utils.units import GB

# InternLM-7B is Llama's shape with the vocabulary of its tokenizer (configs/7B_sft.py).
INTERN = replace(model_shape("llama-2-7b"), name="internlm-7b", vocabulary=103_168)
SEQUENCE_LENGTH, MICRO_BATCHES = 2048, 4
# MegaScale's baseline is Megatron-LM at 285068c8, with a vocabulary of 64,000. That it hid neither
# sends nor data parallelism, and had older operators, is told by Table 3 of the paper alone: what
# MegaScale's own overlap and operators add to that baseline, 2.5, 1.5 and 1.7 points of MFU.
BASELINE = replace(
    framework("megatron"),
    name="megatron-285068c8",
    hides_sends=False,
    overlap_gradients=False,
    overlap_parameters=False,
    flash_generation=1,
)
BASELINE_MODEL = replace(model_shape("megatron-175b"), name="megascale-175b", vocabulary=64_000)


def internevo_comparisons() -> list[Comparison]:
    """Tokens per second and GPU, 8 to 1,024 GPUs; ZeRO-1 over all replicas, and in groups."""
    rows = []
    for row in table("internevo"):
        kind = "in groups" if row["zero1"] != "0" else "over all"
        for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
            cluster, plan, batch = internevo_setup(row, gpus)
            rate = batch.tokens / step_time(INTERN, cluster, plan, batch).total / gpus
            rows.append(
                Comparison(
                    f"InternEvo ZeRO-1 {kind}",
                    "tokens/s/GPU",
                    f"tp{row['tp']} x{gpus}",
                    float(row[f"g{gpus}"]),
                    rate,
                    1.0,
                )
            )
    return rows


def internevo_setup(row: dict[str, str], gpus: int) -> tuple[Cluster, Plan, Batch]:
    """Cluster, plan and batch of one cell: 4 ports of 100 Gb/s RoCE for 8 A100."""
    cluster = Cluster(
        gpu="A100-80GB",
        nodes=gpus // 8,
        network_bytes_per_second=4 * 12.5 * GB,
        network_ports=4,
        network_kind="RoCE",
    )
    tp, group = whole(row["tp"]), whole(row["zero1"])
    dp = gpus // tp
    plan = Plan(
        dp=dp,
        tp=tp,
        zero_stage=1,
        shard_ranks=min(group, dp) if group else None,
        micro_batch=2 * tp,
        sequence_parallel=tp > 1,
        framework="internevo",
    )
    sequences = dp * plan.micro_batch * MICRO_BATCHES
    return cluster, plan, Batch(sequences=sequences, sequence_length=SEQUENCE_LENGTH)


def fms_comparisons() -> list[Comparison]:
    """Tokens per second and GPU of Llama 2 under FSDP and HSDP, 128 A100 with 400 Gb/s a node."""
    cluster = Cluster(
        gpu="A100-80GB",
        nodes=16,
        network_bytes_per_second=4 * 12.5 * GB,
        network_ports=4,
        network_kind="RoCE",
    )
    rows = []
    for row in table("fms_fsdp"):
        model: ModelShape = model_shape(row["model"])
        plan = Plan(
            dp=128,
            zero_stage=3,
            shard_ranks=8 if row["sharding"] == "HSDP" else None,
            micro_batch=whole(row["batch"]),
            framework=BF16_REDUCED,
            recompute="full" if row["checkpointing"] == "1" else "none",
        )
        batch = Batch(sequences=128 * plan.micro_batch, sequence_length=4096)
        rate = batch.tokens / step_time(model, cluster, plan, batch).total / 128
        rows.append(
            Comparison(
                "fms-fsdp",
                "tokens/s/GPU",
                f"{row['model']} {row['sharding']}",
                float(row["tokens_per_gpu_s"]),
                rate,
                batch.tokens / model_flops(model, batch),
            )
        )
    return rows


# fms_fsdp/policies/mixed_precision.py, bfSixteen: parameters and reductions in bfloat16. Its norms
# and gate are PyTorch's own.
BF16_REDUCED = replace(framework("fsdp"), name="fms-fsdp", reduce_bytes=2)


def megascale_comparisons(overlapped: bool = False) -> list[Comparison]:
    """Seconds of an iteration of GPT 175B, 256 to 12,288 GPUs.

    Args:
        overlapped: As today's Megatron-LM would run them, with what it hides by default.
    """
    model, rows = BASELINE_MODEL, []
    for row in table("megascale_table2"):
        gpus, batch = whole(row["gpus"]), Batch(sequences=whole(row["batch"]), sequence_length=2048)
        cluster = Cluster(gpu="A100-80GB", nodes=gpus // 8)
        plan = Plan(
            dp=gpus // 64,
            tp=8,
            pp=8,
            virtual_stages=6,
            sequence_parallel=True,
            zero_stage=1,
            framework="megatron" if overlapped else BASELINE,
        )
        seconds = step_time(model, cluster, plan, batch).total
        size = model_flops(model, batch) / gpus
        rows.append(
            Comparison(
                "MegaScale's Megatron-LM",
                "seconds",
                f"x{gpus} batch {row['batch']}",
                float(row["iteration_s"]),
                seconds,
                size,
            )
        )
    return rows
