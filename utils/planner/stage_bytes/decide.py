"""Bytes of one rank, by category and pipeline stage, at the moment when they are most."""

from __future__ import annotations

from utils.catalog import ModelShape, model_shape
from utils.planner import calibration
from utils.planner.batch import Batch
from utils.planner.layout import Plan
from utils.planner.plan_context import PlanContext
from utils.planner.stage_bytes.peak_moments import device_blocks, frees_gradients, moments
from utils.planner.stage_bytes.stage_memory import PREDICTED, StageMemory
from utils.planner.stage_bytes.states import (
    buffer_bytes,
    dummy_gradient_bytes,
    host_bytes,
    states,
    step_bytes,
)
from utils.planner.stages import Stage
from utils.units import Category


def memory(model: ModelShape | str, plan: Plan, batch: Batch) -> tuple[StageMemory, ...]:
    """Peak memory of each pipeline stage, first to last.

    Raises:
        ValueError: plan, model and batch do not divide, see `Plan.check`.
    """
    context = PlanContext(model_shape(model), plan, batch)
    context.check()
    return stage_memories(context)


def stage_memories(context: PlanContext) -> tuple[StageMemory, ...]:
    """`memory` of a context that is already checked."""
    return tuple(_stage_memory(context, stage) for stage in context.stages)


def kind_memories(context: PlanContext) -> tuple[StageMemory, ...]:
    """The same of a stage of each kind, among them the one that holds most."""
    return tuple(_stage_memory(context, stage) for stage in context.distinct_stages)


def _stage_memory(context: PlanContext, stage: Stage) -> StageMemory:
    lasting, on_host = _lasting(context, stage), host_bytes(context, stage)
    step = {Category.TEMPORARIES: step_bytes(context.plan, stage)}
    held = moments(context, stage) | {"step": step}
    if frees_gradients(context):
        late = _late_gradients(stage, lasting.pop(Category.GRADIENTS))
        for name, moment in held.items():
            moment[Category.GRADIENTS] = late.get(name, 0.0)
    sums = {name: _added(lasting, moment) for name, moment in held.items()}
    phase = max(sums, key=lambda name: sum(sums[name].values()))
    alone, blocks = context.plan.ranks == 1, context.in_flight[stage.index]
    away = (blocks - device_blocks(context, stage)) * context.activations.kept[stage.kind]
    return StageMemory(
        stage,
        phase,
        bytes_by_category=sums[phase],
        parameters=stage.parameters,
        in_flight=blocks,
        context_bytes=outside_allocator_bytes(context.plan),
        gaps=calibration.FRAGMENTATION_ALONE if alone else calibration.FRAGMENTATION,
        host_bytes=on_host + away,
    )


def _lasting(context: PlanContext, stage: Stage) -> dict[Category, float]:
    """What stays from step to step.

    Among it block inputs and their gradients that interleaving receives and keeps, one pair a chunk.
    Inferred: Megatron-LM's interleaved schedule is a nest of closures, whose lists Python frees
    late; its CI logs 2 * (v - 1) such tensors more than the states between steps.
    """
    received = 2 * (context.plan.virtual_stages - 1) * context.activations.block_input
    return states(context, stage) | {
        Category.WORKSPACES: calibration.WORKSPACE_BYTES + dummy_gradient_bytes(context),
        Category.COMMUNICATION: buffer_bytes(context.plan, stage) + received,
    }


def _late_gradients(stage: Stage, whole: float) -> dict[str, float]:
    """Gradients that a single backward pass has made by each moment."""
    share = whole / stage.parameters
    head = stage.head_parameters * share
    first = head + min(stage.layers, 1) * stage.widest_block * share
    after = {"end of backward": whole, "step": whole}
    return {"backward of the head": head, "backward": first, **after}


def _added(lasting: dict[Category, float], moment: dict[Category, float]) -> dict[Category, float]:
    return {name: lasting.get(name, 0.0) + moment.get(name, 0.0) for name in PREDICTED}


def outside_allocator_bytes(plan: Plan) -> float:
    """CUDA's context, and the buffers of the plan's NCCL communicators."""
    axes = [plan.tp > 1, plan.dp * plan.cp > 1, plan.pp > 1]
    groups = sum(axes) if sum(axes) > 1 else 0  # one axis alone talks through the world's
    stages_talk = 3 * (plan.pp > 1)  # embedding, and a pair with each neighbour
    joined = plan.pp > 1 and plan.tp > 1  # the model-parallel group
    count = (plan.ranks > 1) + groups + stages_talk + joined
    return calibration.CUDA_CONTEXT_BYTES + count * calibration.COMMUNICATOR_BYTES
