"""Mixtures of experts, dealt over ranks: parameters, activations and time of a block with experts.

Expert parallelism (Lepikhin et al. 2020, arXiv:2006.16668): each rank keeps E / ep experts, and an
all-to-all sends every token to the ranks of its k experts and back. As in Megatron-Core
(megatron/core/transformer/moe), the ep ranks are taken from those of dp, cp and tp, and experts may
be split over fewer tensor-parallel ranks than attention is. Tokens are taken as evenly routed.

Bytes are held against Megatron-LM's own rows. Seconds are not calibrated: beside NVIDIA's published
rates of Qwen 3 (Megatron-Bridge, docs/performance-summary.md, commit 067f987) most lie from 40%
below to 40% above, and one layout's rates differ by half between its own releases.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from utils.catalog import ModelShape
from utils.planner.cluster import Cluster
from utils.planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
)
from utils.planner.fp8 import gathered_width
from utils.planner.kernels import matmul_seconds, memory_seconds
from utils.planner.layout import Plan

# Bytes an element that the kernels of a routed token move, reads and writes counted one by one in
# two bytes: sorted and sent off, put back and weighted, and the same backward.
PERMUTED_FORWARD, PERMUTED_BACKWARD = 8, 8
ROUTER_BYTES = 4  # logits, probabilities and their mask are float32


@dataclass(frozen=True)
class ExpertWork:
    """Seconds of what a block with experts does in the place of its feed-forward layer.

    Attributes:
        matmul: Forward products; backward takes twice that.
        forward_memory, backward_memory: Routing, activation, adding up.
        communication: All-to-all there and back, and what the experts' tp ranks exchange.
    """

    matmul: float
    forward_memory: float
    backward_memory: float
    communication: float


def expert_tp(plan: Plan) -> int:
    """Ranks that share one expert's matrices: tp, where the plan does not say."""
    return plan.tp if plan.expert_tp is None else plan.expert_tp


def expert_replicas(plan: Plan) -> int:
    """Ranks that hold the same experts, over which their states are sharded."""
    return plan.dp * plan.cp * plan.tp // (plan.ep * expert_tp(plan))


def rank_parameters(model: ModelShape, plan: Plan) -> tuple[float, float]:
    """Feed-forward parameters of one block on one rank: its experts, and router with shared ones."""
    counts = model.expert_parameter_counts()
    experts = counts["experts"] / plan.ep / expert_tp(plan)
    return experts, counts["router"] + counts["shared"] / plan.tp


def routed_tokens(model: ModelShape, plan: Plan, tokens: float) -> float:
    """Tokens that one rank's experts work on, each counted for every expert it is sent to.

    Args:
        model: The model.
        plan: The layout.
        tokens: Of one micro-batch on a rank of a context-parallel group.
    """
    return (model.experts_per_token or 0) * tokens * expert_tp(plan) / plan.tp


@lru_cache
def shared_model(model: ModelShape) -> ModelShape:
    """The dense model whose feed-forward layer is the shared experts; one wide where there are none."""
    return replace(
        model, num_experts=None, experts_per_token=None, expert_feedforward=None, dense_layers=0,
        shared_feedforward=0, feedforward=max(1, model.shared_feedforward),
    )  # fmt: skip


def expert_work(model: ModelShape, cluster: Cluster, plan: Plan, tokens: float) -> ExpertWork:
    """Seconds of routing, exchange and experts of one block and micro-batch."""
    gpu, h, split = cluster.device, model.hidden, expert_tp(plan)
    held = (model.num_experts or 1) // plan.ep
    routed, width = routed_tokens(model, plan, tokens), model.expert_width / split
    up = 2 * width if model.family == "llama" else width
    own = tokens / (plan.tp if plan.sequence_parallel else 1)
    products = matmul_seconds(gpu, routed / held, up, h, held, plan.precision)
    products += matmul_seconds(gpu, routed / held, h, width, held, plan.precision)
    products += matmul_seconds(gpu, own, max(8, model.num_experts or 1), h)
    inner = (6, 10) if model.family == "llama" else (4, 6)
    moved = routed / split * h, routed * width
    forward = memory_seconds(gpu, PERMUTED_FORWARD * moved[0] + inner[0] * moved[1])
    backward = memory_seconds(gpu, PERMUTED_BACKWARD * moved[0] + inner[1] * moved[1])
    return ExpertWork(products, forward, backward, _exchange(model, cluster, plan, routed))


def _exchange(model: ModelShape, cluster: Cluster, plan: Plan, routed: float) -> float:
    """All-to-all of the tokens to their experts and back; then the tp ranks of an expert."""
    split = expert_tp(plan)
    whole = 2 * routed * model.hidden / split
    sent = all_to_all_seconds(cluster, Group(plan.ep, stride=split), whole)
    return 2 * sent + 2 * all_gather_seconds(cluster, Group(split), whole * split)


def replica_seconds(cluster: Cluster, plan: Plan, count: float) -> tuple[float, float]:
    """Seconds of reducing the gradients of `count` expert parameters, and of gathering them back."""
    ranks = expert_replicas(plan)
    if ranks == 1 or not count:
        return 0.0, 0.0
    group = Group(ranks, stride=plan.ep * expert_tp(plan), one_port=plan.rules.one_port)
    width, gathered = plan.rules.reduce_bytes, gathered_width(plan)
    calls = max(1.0, 2 * count / plan.rules.bucket_size_bytes)
    if plan.zero_stage == 0:
        return all_reduce_seconds(cluster, group, width * count, calls), 0.0
    return (
        all_gather_seconds(cluster, group, width * count, calls),
        all_gather_seconds(cluster, group, gathered * count, calls),
    )
