"""Which of the plans that nobody could tell apart to take: the simplest."""

from __future__ import annotations

from utils.planner.layout import Plan
from utils.planner.plan_estimate import Estimate
from utils.planner.plan_search.compare import plan_name
from utils.units import format_seconds

# Step times nearer than this are below the planner's error: its mean on rows that no constant was
# set on is no smaller for any published source.
ERROR = 0.05

Complexity = tuple[int, int]


def complexity(plan: Plan) -> Complexity:
    """What a team must get right: axes of parallelism and special states first, then chunks.

    The first number counts tp, pp, cp and ep above 1, offload, interleaving, and what is sharded
    beside optimizer state (gradients, parameters); plain replicas and ZeRO-1 count nothing.
    """
    axes = sum(size > 1 for size in (plan.tp, plan.pp, plan.cp, plan.ep))
    states = (plan.offload != "none") + plan.offload_activations + max(0, plan.zero_stage - 1)
    return axes + states + (plan.virtual_stages > 1), plan.virtual_stages


def why_best(best: Estimate, fastest: Estimate) -> str:
    """Why this plan and not the fastest one, with the margin."""
    named = f"{plan_name(best)}: {format_seconds(best.step_seconds)} a step"
    if best.plan == fastest.plan:
        return f"{named}, the fastest; nothing simpler is within {ERROR:.0%}."
    share = best.step_seconds / fastest.step_seconds - 1
    return (
        f"{named}, the simplest within {ERROR:.0%} of the fastest. That is {plan_name(fastest)}, "
        f"{format_seconds(fastest.step_seconds)}: {share:.1%} is below the planner's error."
    )
