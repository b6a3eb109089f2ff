"""Bytes that a rank sends in a step, by axis: what the planner's seconds are made of.

Rings: an all-gather or reduce-scatter of a whole over n ranks sends (n - 1)/n of it, an all-reduce
twice that. `utils.simulation` counts the same of a program.
"""

from __future__ import annotations

from utils.catalog import ModelShape, model_shape
from utils.planner.batch import Batch
from utils.planner.layout import Plan
from utils.planner.plan_context import PlanContext
from utils.planner.stages import Stage
from utils.rules import whole

# Sequence parallelism gathers before two layers and scatters after two, in each pass; without it
# two all-reduces are the same bytes (Korthikanti et al. 2022, section 4.2.2).
BLOCK_PASS = 4
LOSS_REDUCTIONS, LOSS_BYTES = 3, 4  # maximum, sum and the target's logit of a token, in float32


def ring_bytes(collective: str, payload_bytes: float, ranks: int) -> float:
    """What a rank of a ring sends, of a payload as `utils.traffic.Traffic` counts it.

    Raises:
        ValueError: the collective is none of a ring, or there is no rank.
    """
    whole("ring_bytes", ranks=ranks)
    shares = {
        "all-gather": ranks - 1,
        "reduce-scatter": (ranks - 1) / ranks,
        "all-reduce": 2 * (ranks - 1) / ranks,
        "send": 1,
        "receive": 0,
    }
    if collective not in shares:
        raise ValueError(f"{collective!r} is no ring; there are {', '.join(shares)}.")
    return shares[collective] * payload_bytes


def axis_bytes(model: ModelShape | str, plan: Plan, batch: Batch) -> tuple[dict[str, float], ...]:
    """For each pipeline stage, the bytes that one of its ranks sends in a step, by axis.

    The axes are those of `ParallelDims`: "tp", "pp", and for data "shard" and "replicate".

    Raises:
        ValueError: plan, model and batch do not divide, or the plan has experts, adapters or cp.
    """
    context = PlanContext(model_shape(model), plan, batch)
    context.check()
    if plan.cp > 1 or plan.lora is not None or context.model.num_experts:
        raise ValueError(
            "axis_bytes counts tp, pp and data of a dense model that is trained whole. Write cp=1, "
            "lora=None and a model without experts."
        )
    return tuple(
        {"tp": _tensor(context, stage), "pp": _pipeline(context, stage), **_data(context, stage)}
        for stage in context.stages
    )


def _tensor(context: PlanContext, stage: Stage) -> float:
    plan, tokens = context.plan, context.rank_tokens
    ring = (plan.tp - 1) / plan.tp
    one = ring * context.conventions.residual_bytes * tokens * context.model.hidden
    again = 2 * (1 - context.conventions.gathered_inputs) * plan.sequence_parallel
    passes = 2 * BLOCK_PASS + again + BLOCK_PASS * (plan.recompute == "full")
    ends = 2 * (stage.embedding + stage.head)  # forward and backward
    loss = stage.loss * LOSS_REDUCTIONS * 2 * ring * LOSS_BYTES * tokens
    return context.micro_batches * ((stage.layers * passes + ends) * one + loss)


def _pipeline(context: PlanContext, stage: Stage) -> float:
    plan, conventions = context.plan, context.conventions
    if plan.pp == 1:
        return 0.0
    stream = conventions.residual_bytes * context.rank_tokens * context.model.hidden
    chunks, last = plan.virtual_stages, plan.pp - 1
    sends = 2 * chunks - (stage.index == 0) - (stage.index == last)  # activations, gradients
    scattered = plan.sequence_parallel or conventions.scattered_sends
    return context.micro_batches * sends * stream / (plan.tp if scattered else 1)


def _data(context: PlanContext, stage: Stage) -> dict[str, float]:
    plan, conventions, m = context.plan, context.conventions, context.micro_batches
    n, replicas, count = plan.dims.shard, plan.dims.replicate, stage.parameters
    ring, between = (n - 1) / n, 2 * (replicas - 1) / replicas
    ends = stage.embedding_parameters + stage.head_parameters
    gathers = {0: 0.0, 1: count, 2: count, 3: 2 * m * count}[plan.zero_stage]
    if plan.zero_stage == 3 and conventions.keeps_ends:
        gathers -= m * ends  # from forward to backward
    reductions = m if plan.zero_stage >= 2 else 1
    scattered = plan.zero_stage == 3 or not conventions.whole_gradients  # half of an all-reduce
    passes = reductions if scattered else 2 * reductions
    sent = conventions.gathered_bytes * gathers + conventions.reduce_bytes * passes * count
    return {"shard": ring * sent, "replicate": between * conventions.reduce_bytes * count / n}
