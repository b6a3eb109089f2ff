"""What comes and goes within a step, at each moment that can be the peak of a rank."""

from __future__ import annotations

from utils.planner.layout import Plan
from utils.planner.plan_context import PlanContext
from utils.planner.stage_bytes.states import gradients_leave
from utils.planner.stages import Stage
from utils.units import Category

LOGITS_AND_GRADIENT = 4  # bytes per logit: both, in 16 bits
CHUNKS_OF_LOSS = 8  # pieces of the tokens, where the loss is chunked
ON_DEVICE = 2  # blocks whose activations stay where the others are offloaded

Moments = dict[str, dict[Category, float]]


def moments(context: PlanContext, stage: Stage) -> Moments:
    """Bytes on top of the lasting ones in a micro-batch, by moment and category."""
    return _until_the_head(context, stage) | _in_backward(context, stage)


def _until_the_head(context: PlanContext, stage: Stage) -> Moments:
    """All is kept: at the end of the last forward pass, and where the head's backward pass begins."""
    logits, conventions = stage.loss * context.logits, context.conventions
    held = {
        Category.GATHERED: gathered_bytes(context, stage),
        Category.ACTIVATIONS: device_blocks(context, stage) * context.activations.kept[stage.kind],
    }
    deferred = _deferred_bytes(context, stage)
    of_loss = deferred + logits * min(conventions.loss_bytes, LOGITS_AND_GRADIENT)
    return {
        "forward": {
            **held,
            Category.LOGITS_AND_LOSS: logits * _logit_bytes(context.plan) + deferred,
            Category.TEMPORARIES: _dequantized(context, stage),
        },
        "backward of the head": {
            **held,
            Category.LOGITS_AND_LOSS: of_loss,
            Category.TEMPORARIES: _head_gradient_bytes(context, stage),
        },
    }


def _in_backward(context: PlanContext, stage: Stage) -> Moments:
    """In the last block, when all is kept still; and in the first, when one block is left."""
    kept, working = (
        by[stage.kind] for by in (context.activations.kept, context.activations.working)
    )
    blocks = device_blocks(context, stage)
    passing = on_device(context.plan, stage, stage.layers / context.plan.virtual_stages)
    gradients = _backward_gradients(context.plan, stage) + _dequantized(context, stage)
    gathered = {
        Category.GATHERED: gathered_bytes(context, stage) + _reduced_bytes(context.plan, stage)
    }
    return {
        "backward": {
            **gathered,
            Category.ACTIVATIONS: blocks * kept,
            Category.LOGITS_AND_LOSS: _deferred_bytes(context, stage),
            Category.TEMPORARIES: working + gradients / max(passing, 1),
        },
        "end of backward": {
            **gathered,
            Category.ACTIVATIONS: (blocks - passing + min(passing, 1)) * kept,
            Category.TEMPORARIES: working + gradients,
        },
    }


def device_blocks(context: PlanContext, stage: Stage) -> float:
    """Of the blocks in flight those whose activations stay on the device."""
    return on_device(context.plan, stage, context.in_flight[stage.index])


def on_device(plan: Plan, stage: Stage, blocks: float) -> float:
    """Of so many blocks of a stage, those whose activations stay on the device.

    All but `ON_DEVICE` go to the host; with `Plan.offload_layers` that share of the stage's blocks.
    """
    if not plan.offload_activations:
        return blocks
    some = stage.layers if plan.offload_layers is None else plan.offload_layers
    away = min(1.0, some / max(stage.layers, 1)) * blocks
    return max(min(blocks, ON_DEVICE), blocks - away)


def gathered_bytes(context: PlanContext, stage: Stage) -> float:
    """Whole parameters that ZeRO-3 holds while it computes.

    The block at work and the prefetched ones; and on a stage that holds them, embedding and head.
    FSDP keeps these two from forward to backward, as part of no block; others gather them when they
    are needed, which counts where the larger is more than a block.
    """
    plan, conventions = context.plan, context.conventions
    if plan.zero_stage < 3 or plan.shard_group == 1:
        return 0.0
    block, blocks = stage.widest_block, min(conventions.gathered_blocks, stage.layers)
    width, each = context.gathered_held, conventions.gathered_bytes
    if conventions.keeps_ends:
        ends = stage.embedding_parameters + stage.head_parameters
        return each * ends + width * blocks * block
    ends = context.table if stage.embedding or stage.head else 0.0
    return max(width * blocks * block, each * ends + width * (blocks - 1) * block)


def frees_gradients(context: PlanContext) -> bool:
    """Whether no gradient is held in forward: freed after each step, and one micro-batch a step."""
    return context.conventions.frees_gradients and context.micro_batches == 1


def _logit_bytes(plan: Plan) -> float:
    """Bytes for each logit of a micro-batch on the rank at the peak of the loss."""
    if plan.loss == "fused":
        return plan.conventions.residual_bytes  # the gradient is written over the logits
    pieces = CHUNKS_OF_LOSS if plan.loss == "chunked" else 1
    return plan.conventions.loss_bytes / pieces


def _deferred_bytes(context: PlanContext, stage: Stage) -> float:
    """Gradients of logits that wait for the head's gradient."""
    waiting = min(context.conventions.deferred_heads, context.micro_batches - 1)
    return 2 * (stage.loss * context.logits) * waiting


def _reduced_bytes(plan: Plan, stage: Stage) -> float:
    """Gradients of a whole block, on their way to the ranks that keep a share of them."""
    leave = gradients_leave(plan.conventions, plan.zero_stage, plan.offload)
    sharded = plan.zero_stage == 3 and (plan.shard_group > 1 or leave)
    if not plan.conventions.keeps_ends or not sharded:
        return 0.0
    return plan.conventions.reduce_bytes * min(stage.layers, 1) * stage.widest_block


def _head_gradient_bytes(context: PlanContext, stage: Stage) -> float:
    """The head's own gradient, or its stand-in, while logits and their gradient are still there.

    Where gradients are freed after the step it stays, and counts as one of them.
    """
    if context.plan.lora is not None or not stage.head or frees_gradients(context):
        return 0.0
    return context.conventions.residual_bytes * context.table


def _backward_gradients(plan: Plan, stage: Stage) -> float:
    if plan.lora is not None:
        return 0.0
    if plan.optimizer_in_backward:
        widest = max(stage.widest_block, stage.embedding_parameters, stage.head_parameters)
        return widest * plan.conventions.gradient_bytes
    return stage.parameters * plan.conventions.backward_gradient_bytes


def _dequantized(context: PlanContext, stage: Stage) -> float:
    """The largest matrix, back in 16 bits while it multiplies."""
    lora = context.plan.lora
    if lora is None or lora.base == "bf16":
        return 0.0
    largest = max(rows * columns for rows, columns in context.matrices.values())
    if stage.head and lora.quantized_head:
        largest = max(largest, context.model.vocabulary * context.model.hidden)
    return 2 * largest / context.plan.tp
