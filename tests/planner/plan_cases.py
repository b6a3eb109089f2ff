"""What tests of plans share: models, a node, a batch, and plans of every kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from utils.catalog import ModelShape, model_shape
from utils.planner import Batch, Cluster, Estimate, Plan, estimate

GPT = model_shape("megatron-7.5b")
BIG = model_shape("megatron-175b")
LLAMA = model_shape("llama-2-7b")
NODE = Cluster(gpu="A100-80GB", nodes=1)
BATCH = Batch(sequences=64, sequence_length=2048)
PLANS = st.builds(
    Plan,
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
    attention=st.sampled_from(["flash", "unfused"]),
    dropout=st.booleans(),
    micro_batch=st.sampled_from([1, 2, 4]),
    framework=st.sampled_from(["megatron", "nanotron", "fsdp", "deepspeed", "fp32"]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    partition=st.sampled_from(["even", "ends", "compute"]),
)


def cluster_of(gpus: int, **fields: Any) -> Cluster:
    """So many A100, on nodes of eight."""
    return Cluster(gpu="A100-80GB", nodes=max(1, gpus // 8), gpus_per_node=min(8, gpus), **fields)


def estimated(model: ModelShape = GPT, batch: Batch = BATCH, **fields: Any) -> Estimate:
    """A plan on as many A100 as it needs."""
    plan = Plan(**fields)
    return estimate(model, cluster_of(plan.ranks), plan, batch)
