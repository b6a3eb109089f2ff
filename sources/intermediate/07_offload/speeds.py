"""How fast a card computes while it trains, by the planner, and how fast its link copies."""

from __future__ import annotations

from typing import NamedTuple

from utils.catalog import ModelShape, device
from utils.planner import Batch, Cluster, Plan, estimate
from utils.planner.offload import CHECKPOINTED_FLOPS
from utils.units import GB

__all__ = ["Speeds", "training_speeds"]

TEXTS = Batch(sequences=16, sequence_length=2048)


class Speeds(NamedTuple):
    """Of a card: operations per second in training, and bytes per second of its link, one way.

    The link's are those of a large pinned copy with nothing beside it, as a probe measures them.
    """

    flops: float
    link: float


def training_speeds(shape: ModelShape, name: str) -> Speeds:
    """A full fine-tune of `shape` on one such card, every block checkpointed, four texts at once."""
    card = device(name)
    cluster = Cluster(gpu=card, nodes=1, gpus_per_node=1, host_memory_bytes=160 * GB)
    how = {"offload": "optimizer", "framework": "deepspeed", "zero_stage": 2, "recompute": "full"}
    told = estimate(shape, cluster, Plan(micro_batch=4, **how), TEXTS)
    operations = CHECKPOINTED_FLOPS * shape.parameter_count * TEXTS.tokens
    compute_seconds = told.step_seconds - told.time.optimizer
    return Speeds(operations / compute_seconds, card.host_link.sustained_bytes_per_second)
