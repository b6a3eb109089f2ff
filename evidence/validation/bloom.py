"""The BLOOM prequel: 175-200B layouts on A100-80GB, memory by nvidia-smi, OOMs, seconds."""

from __future__ import annotations

from evidence.validation.comparison import Comparison
from evidence.validation.tables import number, table, whole
from utils.catalog import ModelShape, device
from utils.planner import Batch, Cluster, Plan, memory, step_time, worst
from utils.planner.flops import model_flops
from utils.units import GB

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
            Comparison(
                "BLOOM prequel",
                "nvidia-smi GB",
                _case(row),
                published,
                held.device_bytes / GB,
                held.parameters,
                row["section"] in FITTED_SECTIONS,
            )
        )
    return rows


def fit_verdicts() -> list[tuple[str, bool, bool]]:
    """(row, it ran, we say that it fits) for every row that names a memory or an OOM."""
    verdicts = []
    for row in table("bloom_prequel"):
        if row["mem_gb"]:
            held = worst(memory(*setup(row)))
            verdicts.append((_case(row), row["mem_gb"] != "OOM", held.fits(GPU)))
    return verdicts


def seconds_comparisons() -> list[Comparison]:
    """Seconds of the second iteration."""
    rows = []
    for line, row in enumerate(table("bloom_prequel")):
        published = number(row["sec_per_it"])
        if published is not None:
            size = model_flops(_model(row), setup(row)[2]) / whole(row["n_gpus"])
            rows.append(
                Comparison(
                    "BLOOM prequel",
                    "seconds",
                    _case(row),
                    published,
                    seconds(row),
                    size,
                    line % 2 == 0,
                )
            )
    return rows


def seconds(row: dict[str, str]) -> float:
    """Predicted seconds of one row."""
    model, plan, batch = setup(row)
    return step_time(model, jean_zay(plan.ranks), plan, batch).total


def jean_zay(gpus: int) -> Cluster:
    """Eight A100 and four ports of Omni-Path 100 a node (chronicles-prequel.md)."""
    return Cluster(
        gpu=GPU, nodes=gpus // 8, network_bytes_per_second=4 * 12.5 * GB, network_kind="Omni-Path"
    )


def effects() -> dict[str, tuple[float, float]]:
    """Two effects of shape, published and predicted: how much longer the worse shape takes.

    "hidden": 14400 against 13824 wide, per FLOP. "heads": 128 against 64, at 13824.
    """
    by_line = {row["line"]: row for row in table("bloom_prequel")}
    pairs = {"hidden": ("518", "584"), "heads": ("740", "738")}
    found = {}
    for name, (worse, better) in pairs.items():
        rows = by_line[worse], by_line[better]
        work = [model_flops(_model(row), setup(row)[2]) for row in rows]
        per_flop = work[1] / work[0]
        found[name] = (
            per_flop * float(rows[0]["sec_per_it"]) / float(rows[1]["sec_per_it"]) - 1,
            per_flop * seconds(rows[0]) / seconds(rows[1]) - 1,
        )
    return found


def setup(row: dict[str, str]) -> tuple[ModelShape, Plan, Batch]:
    """Model, plan and batch of one row."""
    plan = _plan(row)
    sequences = 512 if plan.ranks == 8 else whole(row["gbs"], 2048)  # by their printed TFLOP/s
    sequences -= sequences % (plan.dp * plan.micro_batch)  # some notes name a batch cut short
    return _model(row), plan, Batch(sequences=sequences, sequence_length=2048)


def _model(row: dict[str, str]) -> ModelShape:
    hidden = whole(row["nhidden"])
    return ModelShape(
        name=f"BLOOM line {row['line']}",
        family="gpt",
        layers=whole(row["nlayers"]),
        hidden=hidden,
        heads=whole(row["nheads"]),
        feedforward=4 * hidden,
        vocabulary=250_880,
        max_sequence=2048,
        positions="alibi",
        embedding_norm=True,
        tied=True,
    )


def _plan(row: dict[str, str]) -> Plan:
    late = row["grad_mode"] == BF16
    return Plan(
        dp=_replicas(row),
        tp=whole(row["tp"]),
        pp=whole(row["pp"]),
        micro_batch=whole(row["mbs"]),
        zero_stage=whole(row["zero_stage"]),
        recompute="full",
        attention="unfused",
        dropout=True,
        partition="ends" if late else "even",
        framework="megatron-deepspeed-bf16" if late else "megatron-deepspeed-fp16",
    )


def _replicas(row: dict[str, str]) -> int:
    """dp by the GPUs; one note names 8 where its 320 GPUs make 4."""
    gpus = whole(row["n_gpus"])
    stages = whole(row["tp"]) * whole(row["pp"])
    return gpus // stages if gpus % stages == 0 else whole(row["dp"])


def _case(row: dict[str, str]) -> str:
    layout = f"tp{row['tp']} pp{row['pp']} dp{row['dp']} mbs{row['mbs']}"
    return f"line {row['line']}: {row['nhidden']}x{row['nlayers']}, {row['nheads']} heads, {layout}"
