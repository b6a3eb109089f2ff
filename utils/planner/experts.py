"""Mixtures of experts, dealt over ranks: who shares what, and the parameters of a block with experts.

Expert parallelism (Lepikhin et al. 2020, arXiv:2006.16668): each rank keeps E / ep experts, and an
all-to-all sends every token to the ranks of its k experts and back. As in Megatron-Core
(megatron/core/transformer/moe), the ep ranks are taken from those of dp, cp and tp, and experts may
be split over fewer tensor-parallel ranks than attention is. Tokens are taken as evenly routed.

Bytes are held against Megatron-LM's own rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from utils.catalog import ModelShape
from utils.planner.layout import Plan


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


@lru_cache
def shared_model(model: ModelShape) -> ModelShape:
    """The dense model whose feed-forward layer is the shared experts; one wide where there are none."""
    return replace(
        model,
        num_experts=None,
        experts_per_token=None,
        expert_feedforward=None,
        dense_layers=0,
        shared_feedforward=0,
        feedforward=max(1, model.shared_feedforward),
    )
