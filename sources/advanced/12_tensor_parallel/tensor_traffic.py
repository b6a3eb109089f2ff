"""Bytes that a rank puts into the collectives of tensor parallelism in a step.

A block sends the stream (b, s, h) four times: after attention and feed-forward going forward, before
them going back (Shoeybi et al. 2019, arXiv:1909.08053, section 3). With sequence parallelism each
all-reduce is a reduce-scatter and an all-gather, and inputs that were not kept gathered are gathered
once more in backward (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

Payload is what a rank puts in: the whole tensor for an all-reduce or reduce-scatter, its own part
for an all-gather.
"""

from __future__ import annotations

from utils.catalog import ModelShape
from utils.planner.batch import Batch
from utils.planner.layout import Plan
from utils.planner.plan_context import PlanContext

STREAM_BYTES, LOSS_BYTES = 2, 4  # bf16; the loss works in fp32
NUMBERS_OF_LOSS = 3  # maximum, sum and the target's logit of each token


def tensor_traffic(model: ModelShape, plan: Plan, batch: Batch) -> dict[str, float]:
    """Payload bytes of one rank and step over the axis tp, by collective.

    Args:
        model: The model.
        plan: The layout, without pipeline stages: with them ends and blocks stand on other ranks.
        batch: The global batch.

    Raises:
        ValueError: the plan has pipeline stages or experts, whose traffic is another.
    """
    if plan.pp > 1 or model.num_experts:
        raise ValueError(
            "tensor_traffic() counts a model without experts on one stage: write pp=1, and multiply "
            "a block's share by the layers of a stage."
        )
    if plan.tp == 1:
        return {}
    context = PlanContext(model, plan, batch)
    sums = _stream(plan, model.layers, STREAM_BYTES * context.rank_tokens * model.hidden)
    sums["all-reduce"] += NUMBERS_OF_LOSS * LOSS_BYTES * context.rank_tokens
    total = {kind: context.micro_batches * size for kind, size in sums.items() if size}
    once = _shared_gradients(model, plan)
    if once:
        total["all-reduce"] += once
    return total


def _stream(plan: Plan, layers: int, whole: float) -> dict[str, float]:
    """One micro-batch: blocks, embedding and head."""
    # Twice forward and twice backward; once more forward where blocks are recomputed.
    passes = layers * (4 + 2 * (plan.recompute == "full"))
    if not plan.sequence_parallel:
        return {"all-reduce": (passes + 2) * whole}  # embedding forward, head backward
    again = (2 * layers + 1) * (1 - plan.conventions.gathered_inputs)
    return {
        "reduce-scatter": (passes + 2) * whole,
        "all-gather": (passes + 2 + again) * whole / plan.tp,
        "all-reduce": 0.0,
    }


def _shared_gradients(model: ModelShape, plan: Plan) -> float:
    """Once a step: gradients of what every rank holds whole and sees a part of."""
    biases = 2 * model.hidden * (model.family == "gpt")
    norms = model.layer_parameter_counts()["norms"] + biases
    alike = (model.layers * norms + model.norm_parameters) * plan.sequence_parallel
    copied = 0.0
    if plan.tp > model.key_value_heads:
        copied = 2 * model.layers * (model.hidden + model.qkv_bias) * model.head_dim
    return STREAM_BYTES * (alike + copied)
