"""Seconds of fine-tunes by transformers and peft on one GPU: Qwen's tables, PEFT's comparison.

The planner's seconds have no constant from these rows. The interval that it prints for them
(`plan_estimate.EAGER_INTERVAL`) was set on the even lines of each table.
"""

from __future__ import annotations

from dataclasses import replace

from evidence.validation.adapters import LLAMA_32_3B
from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape, device
from utils.planner import Batch, Cluster, Estimate, Lora, Plan, estimate
from utils.units import GB

# config.json of Qwen/Qwen-1_8B, Qwen-7B and Qwen-14B; their intermediate_size is of two matrices.
QWEN = {
    name: ModelShape(
        name=f"qwen-{name}",
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        feedforward=feedforward,
        vocabulary=vocabulary,
        max_sequence=8192,
    )
    for name, layers, hidden, heads, feedforward, vocabulary in (
        ("1.8B", 24, 2048, 16, 5504, 151_936),
        ("7B", 32, 4096, 32, 11_008, 151_936),
        ("14B", 40, 5120, 40, 13_696, 152_064),
    )
}
MICRO_BATCHES = 8
# One matrix makes q, k and v, which has one adapter: said here by q's. Until peft 0.7 adapters were
# made in float32 (tuners/lora/layer.py, update_layer); autocast runs their products in 16 bits.
QWEN_LORA = Lora(
    rank=64, targets=("q", "o", "gate", "up", "down"), autocast=True, adapter_dropout=True
)
# NVIDIA L40S data sheet: 864 GB/s, 362 TFLOP/s in 16 bits without sparsity, 91.6 in 32.
L40S = replace(
    device("L4"),
    name="L40S",
    memory_gb=48,
    memory_bytes=int(48 * GB),
    memory_bytes_per_second=864 * GB,
    fp16_tflops=362,
    bf16_tflops=362,
    fp32_tflops=91.6,
    matmul_ceiling_tflops=None,
)
TOKENS_OF_RUN, STEPS_OF_RUN = 4_198_051, 5000


def comparisons() -> list[Comparison]:
    """Seconds of a step."""
    return [row for row, _ in with_estimates()]


def memory_comparisons() -> list[Comparison]:
    """What Qwen's table calls G of memory, taken as 1e9 bytes of the device: it does not say of which
    kind they are."""
    rows = []
    for row in table("qwen_finetunes"):
        found = qwen(row)
        rows.append(
            Comparison(
                "Qwen LoRA by peft",
                "device GB",
                f"{row['size']} s{row['seq_len']}",
                float(row["memory_g"]),
                found.peak.device_bytes / GB,
                found.model.parameter_count,
            )
        )
    return rows


def with_estimates() -> list[tuple[Comparison, Estimate]]:
    """Every row with its plan's estimate, whose interval it should lie in."""
    rows = []
    for row in table("qwen_finetunes"):
        found = qwen(row)
        rows.append(
            (
                _compared(
                    "Qwen LoRA by peft",
                    f"{row['size']} s{row['seq_len']}",
                    float(row["seconds"]),
                    found,
                ),
                found,
            )
        )
    for row in table("peft_seconds"):
        found = method(row)
        seconds = float(row["seconds_of_250_steps"]) / 250
        rows.append((_compared("PEFT methods", row["experiment"], seconds, found), found))
    return rows


def qwen(row: dict[str, str]) -> Estimate:
    """One row of Qwen's table."""
    plan = Plan(framework="peft", lora=QWEN_LORA, recompute="full")
    cluster = Cluster(gpu="A100 80GB", nodes=1, gpus_per_node=1)
    batch = Batch(sequences=MICRO_BATCHES, sequence_length=whole(row["seq_len"]))
    return estimate(QWEN[row["size"]], cluster, plan, batch)


def method(row: dict[str, str]) -> Estimate:
    """One row of PEFT's comparison, with sequences of the mean length (its buckets are alike)."""
    lora = Lora(rank=whole(row["r"]), targets=tuple(row["targets"].split())) if row["r"] else None
    plan = Plan(framework="peft" if lora else "transformers", lora=lora, micro_batch=4)
    length = round(TOKENS_OF_RUN / STEPS_OF_RUN / 4)
    cluster = Cluster(gpu=L40S, nodes=1, gpus_per_node=1)
    return estimate(LLAMA_32_3B, cluster, plan, Batch(sequences=4, sequence_length=length))


def _compared(source: str, case: str, published: float, found: Estimate) -> Comparison:
    size = found.model.parameter_count * found.batch.tokens
    return Comparison(source, "seconds", case, published, found.step_seconds, size)
