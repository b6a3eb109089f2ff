"""Seconds that the planner predicts for the script's step."""

from __future__ import annotations

from utils.planner import Batch, Cluster, Lora, Plan, estimate
from utils.planner.adapters import TARGETS


def step_seconds(packed: bool, checkpointed: bool) -> float:
    """Of 4 x 1,024 tokens of Llama-2-7B on an RTX 4090, adapters of rank 16 on all matrices.

    Predicted whether or not it fits.

    Args:
        packed: the frozen weights are in four bits.
        checkpointed: every block is computed again in backward.
    """
    lora = Lora(rank=16, targets=TARGETS, base="nf4-dq" if packed else "bf16", autocast=True)
    plan = Plan(
        micro_batch=4,
        recompute="full" if checkpointed else "none",
        lora=lora,
        framework="peft",
    )
    card = Cluster(gpu="RTX4090", nodes=1, gpus_per_node=1)
    batch = Batch(sequences=4, sequence_length=1024)
    return estimate("llama-2-7b", card, plan, batch).step_seconds
