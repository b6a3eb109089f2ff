"""The BLOOM prequel: 175-200B layouts on A100-80GB, memory by nvidia-smi, OOMs, seconds."""

from __future__ import annotations

from utils.catalog import ModelShape, device
from utils.planner import Batch, Plan, memory, worst
from utils.units import GB
from utils.validation.comparison import Comparison
from utils.validation.tables import number, table, whole

GPU = device("A100-80GB")
BF16 = "bf16_optimizer_fp32_grad_accum"
FITTED_SECTIONS = ("fp16", "bf16", "Choosing the fastest 3D Topology")


def memory_comparisons() -> list[Comparison]:
    """GB of the fullest stage on the rows that ran."""
    rows = []
    for row in table("bloom_prequel"):
        published = number(row["mem_gb"])
        if published is None:
            continue
        held = worst(memory(*setup(row)))
        rows.append(
            Comparison("BLOOM prequel", "nvidia-smi GB", _case(row), published,
                       held.device_bytes / GB, held.parameters,
                       row["section"] in FITTED_SECTIONS)
        )  # fmt: skip
    return rows


def fits() -> list[tuple[str, bool, bool]]:
    """(row, it ran, we say that it fits) for every row that names a memory or an OOM."""
    verdicts = []
    for row in table("bloom_prequel"):
        if row["mem_gb"]:
            held = worst(memory(*setup(row)))
            verdicts.append((_case(row), row["mem_gb"] != "OOM", held.fits(GPU)))
    return verdicts


def setup(row: dict[str, str]) -> tuple[ModelShape, Plan, Batch]:
    """Model, plan and batch of one row."""
    plan = _plan(row)
    sequences = whole(row["gbs"], 2048)
    sequences -= sequences % (plan.dp * plan.micro_batch)  # some notes name a batch cut short
    return _model(row), plan, Batch(sequences=sequences, sequence_length=2048)


def _model(row: dict[str, str]) -> ModelShape:
    hidden = whole(row["nhidden"])
    return ModelShape(
        name=f"BLOOM line {row['line']}", family="gpt", layers=whole(row["nlayers"]),
        hidden=hidden, heads=whole(row["nheads"]), feedforward=4 * hidden, vocabulary=250_880,
        max_sequence=2048, positions="alibi", embedding_norm=True, tied=True,
    )  # fmt: skip


def _plan(row: dict[str, str]) -> Plan:
    late = row["grad_mode"] == BF16
    return Plan(
        dp=whole(row["dp"]), tp=whole(row["tp"]), pp=whole(row["pp"]),
        micro_batch=whole(row["mbs"]), zero_stage=whole(row["zero_stage"]), recompute="full",
        attention="unfused", dropout=True, partition="ends" if late else "even",
        framework="megatron-deepspeed-bf16" if late else "megatron-deepspeed-fp16",
    )  # fmt: skip


def _case(row: dict[str, str]) -> str:
    layout = f"tp{row['tp']} pp{row['pp']} dp{row['dp']} mbs{row['mbs']}"
    return f"line {row['line']}: {row['nhidden']}x{row['nlayers']}, {row['nheads']} heads, {layout}"
