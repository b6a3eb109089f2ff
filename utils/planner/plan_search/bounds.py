"""Bounds below what `estimate` would say, the front of plans found, and what plans share."""

from __future__ import annotations

from utils.catalog import ModelShape
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext, PlanContext
from utils.planner.plan_estimate import Estimate
from utils.planner.schedules import bubble_closed
from utils.planner.stage_bytes.decide import outside_allocator_bytes
from utils.planner.stage_bytes.states import buffer_bytes, states
from utils.planner.step_seconds.block_time import block_times


class Front:
    """Plans that no other beats in both seconds and bytes."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float, Estimate]] = []

    def __bool__(self) -> bool:
        return bool(self._points)

    def beats(self, seconds: float, needed: float) -> bool:
        """Whether some plan is at least as good in both, so that a plan like this cannot enter."""
        return any(s <= seconds and b <= needed for s, b, _ in self._points)

    def add(self, found: Estimate, needed: float) -> None:
        """Let a plan in, and those out that it beats."""
        seconds = found.step_seconds
        if not self.beats(seconds, needed):
            kept = [p for p in self._points if not (seconds <= p[0] and needed <= p[1])]
            self._points = [*kept, (seconds, needed, found)]

    def sorted(self) -> tuple[Estimate, ...]:
        """Fastest first, which is largest first."""
        return tuple(point[2] for point in sorted(self._points, key=lambda p: p[:2]))


def average_block_seconds(context: ClusterPlanContext) -> float:
    """Seconds of an average block, with what the plan recomputes of whole blocks left out."""
    dense, mixed = block_times(context)
    share = context.model.expert_layers / context.model.layers
    kinds = [(1 - share, dense), *([(share, mixed)] if mixed else [])]
    if context.plan.recompute_layers is not None:
        return sum(part * (one.forward.total + one.backward.total) for part, one in kinds)
    return sum(part * one.total for part, one in kinds)


def least_bytes(context: PlanContext) -> float:
    """Below what the fullest of the stages needs: its states, buffers and context."""
    plan = context.plan
    return outside_allocator_bytes(plan) + max(
        sum(states(context, stage).values()) + buffer_bytes(plan, stage)
        for stage in context.distinct_stages
    )


def least_seconds(context: PlanContext, block_seconds: float) -> float:
    """Below the step time: the blocks of an average stage, and the bubble that they leave."""
    plan, m = context.plan, context.micro_batches
    bubble = bubble_closed(plan.pp, m, plan.virtual_stages)
    rounding = 1 - 1e-9
    return m * block_seconds * context.model.layers / plan.pp * (1 + bubble) * rounding


def alike(plan: Plan) -> tuple[object, ...]:
    """What the time of a block depends on, within one search."""
    sizes = plan.tp, plan.cp, plan.micro_batch, plan.ep, plan.expert_tp
    return (*sizes, plan.recompute, plan.recompute_layers, plan.precision)


def same_states(model: ModelShape, plan: Plan) -> tuple[object, ...]:
    """What the lasting bytes depend on, within one search."""
    chunks = plan.virtual_stages if model.dense_layers else 1
    stages = plan.tp, plan.pp, plan.partition, plan.ep, plan.expert_tp, chunks
    return (*stages, plan.cp, plan.zero_stage, plan.offload, plan.precision)
