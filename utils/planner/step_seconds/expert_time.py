"""Seconds of experts: routing, exchange and products of a block.

They are not calibrated: beside NVIDIA's published rates of Qwen 3 (Megatron-Bridge,
docs/performance-summary.md, commit 067f987) most lie from 40% below to 40% above, and one layout's
rates differ by half between its own releases.
"""

from __future__ import annotations

from utils.planner.experts import expert_tp
from utils.planner.plan_context import ClusterPlanContext, PlanContext
from utils.planner.step_seconds.collectives import (
    Group,
    all_gather_seconds,
    all_to_all_seconds,
)
from utils.planner.step_seconds.kernels import matmul_seconds, memory_seconds
from utils.planner.step_seconds.pass_seconds import BlockTime, PassSeconds

# Bytes an element that the kernels of a routed token move, reads and writes counted one by one in
# two bytes: sorted and sent off, put back and weighted, and the same backward.
PERMUTED_FORWARD, PERMUTED_BACKWARD = 8, 8


def routed_tokens(context: PlanContext) -> float:
    """Tokens of a micro-batch that one rank's experts work on, counted for every expert they go to."""
    plan = context.plan
    return (context.model.experts_per_token or 0) * context.rank_tokens * expert_tp(plan) / plan.tp


def expert_seconds(context: ClusterPlanContext) -> BlockTime:
    """What a block with experts does for its feed-forward layer: routing, exchange, experts."""
    model, plan, gpu = context.model, context.plan, context.gpu
    h, split, held = model.hidden, expert_tp(plan), (model.num_experts or 1) // plan.ep
    routed, width = routed_tokens(context), model.expert_width / split
    up = 2 * width if model.family == "llama" else width
    own = context.rank_tokens / (plan.tp if plan.sequence_parallel else 1)
    products = matmul_seconds(gpu, routed / held, up, h, held, plan.precision)
    products += matmul_seconds(gpu, routed / held, h, width, held, plan.precision)
    products += matmul_seconds(gpu, own, max(8, model.num_experts or 1), h)
    inner = (6, 10) if model.family == "llama" else (4, 6)
    moved = routed / split * h, routed * width
    forward = memory_seconds(gpu, PERMUTED_FORWARD * moved[0] + inner[0] * moved[1])
    backward = memory_seconds(gpu, PERMUTED_BACKWARD * moved[0] + inner[1] * moved[1])
    whole = 2 * routed * h / split
    to_experts = all_to_all_seconds(context.cluster, Group(plan.ep, stride=split), whole)
    in_expert = all_gather_seconds(context.cluster, Group(split), whole * split)
    sent = 2 * to_experts + 2 * in_expert  # there and back
    return BlockTime(
        PassSeconds(products, forward, sent), PassSeconds(2 * products, backward, sent)
    )
