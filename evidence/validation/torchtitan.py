"""torchtitan's FSDP2 rows in bfloat16: seconds of Llama 3.1 8B on 8 and 128 H100 of 500 W."""

from __future__ import annotations

from dataclasses import replace

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import ModelShape, device, model_shape
from utils.planner import Batch, Cluster, Plan, framework
from utils.planner.flops import model_flops
from utils.planner.step_seconds import step_time
from utils.planner.step_seconds.block_time import block_time
from utils.units import GB, MIB

# The table's head: HBM2e of 96 GB and 2.4 TB/s, 500 W in place of 700, and 400 Gb/s a GPU. Below
# the power limit clocks rise with about its cube root, since power grows with frequency times
# voltage squared, and voltage with frequency.
POWER_SHARE = (500 / 700) ** (1 / 3)
_H100 = device("H100")
GPU = replace(
    _H100,
    name="H100-96GB-500W",
    memory_gb=96,
    memory_bytes=95_830 * MIB,
    memory_bytes_per_second=2400 * GB,
    matmul_ceiling_tflops=POWER_SHARE * (_H100.matmul_ceiling_tflops or 0),
)
PLAIN = framework("fsdp")
# torch.compile fuses what only moves data: the norms, and SwiGLU.
COMPILED = replace(PLAIN, name="fsdp, compiled", eager_norm=False, fused_gate=True)


def comparisons() -> list[Comparison]:
    """Seconds of a step; none of these rows set a constant."""
    found = []
    for row in lines():
        model, cluster, plan, batch = setup(row)
        published = batch.tokens / cluster.gpus / float(row["tps_per_gpu"])
        compiled = "compiled" if row["compile"] == "1" else "eager"
        case = f"{row['model']} on {row['n_gpus']} GPUs, {compiled}"
        size = model_flops(model, batch) / cluster.gpus
        found.append(
            Comparison(
                "torchtitan", "seconds", case, published, seconds(model, cluster, plan, batch), size
            )
        )
    return found


def lines() -> list[dict[str, str]]:
    """Rows in bfloat16; all others compute in 8 bits."""
    return [row for row in table("torchtitan") if row["float8"] == "0"]


def seconds(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> float:
    """Of a step with selective checkpointing by operation: backward makes every second product
    again, and all that only moves data."""
    forward = block_time(model, cluster, plan, batch).forward
    again = model.layers * (forward.matmul / 2 + forward.memory)
    return step_time(model, cluster, plan, batch).total + plan.micro_batches(batch) * again


def setup(row: dict[str, str]) -> tuple[ModelShape, Cluster, Plan, Batch]:
    """Model, cluster, plan and batch of one row."""
    gpus, local = whole(row["n_gpus"]), whole(row["local_batch"])
    cluster = Cluster(gpu=GPU, nodes=gpus // 8, network_bytes_per_second=8 * 50 * GB)
    plan = Plan(
        dp=gpus,
        zero_stage=3,
        micro_batch=local,
        framework=COMPILED if row["compile"] == "1" else PLAIN,
    )
    batch = Batch(sequences=gpus * local, sequence_length=whole(row["seq_len"]))
    return model_shape("llama-3-8b"), cluster, plan, batch
