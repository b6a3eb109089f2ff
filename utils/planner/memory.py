"""Bytes of one rank, by category and pipeline stage, at the moment when they are most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from utils.catalog import Device, ModelShape, model_shape
from utils.planner import calibration
from utils.planner.activations import (
    block_bytes,
    logit_bytes,
    stage_block_bytes,
    working_bytes,
)
from utils.planner.adapters import matrix_shapes
from utils.planner.experts import expert_replicas
from utils.planner.fp8 import gathered_held
from utils.planner.layout import Batch, Plan
from utils.planner.schedules import in_flight_closed
from utils.planner.stages import Stage, padded_vocabulary, stages, table_parameters
from utils.planner.states import (
    buffer_bytes,
    dummy_gradient_bytes,
    gradients_leave,
    states,
)
from utils.units import Category

# What a plan predicts of the meter's categories, in the order of figures.
PREDICTED = (
    Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE, Category.COMMUNICATION,
    Category.GATHERED, Category.ACTIVATIONS, Category.LOGITS_AND_LOSS, Category.TEMPORARIES,
    Category.WORKSPACES,
)  # fmt: skip
LOGITS_AND_GRADIENT = 4  # bytes per logit: both, in 16 bits

ON_DEVICE = 2  # blocks whose activations stay where the others are offloaded
# Share of the device that a plan should leave free. Of the Ultra-Scale sweep's layouts that need
# more than the rest, gaps included, three in four ran 2.7 to 7 times as long as predicted: the
# allocator gives its whole cache back and takes it again. Of those with less to spare, none did.
HEADROOM = 0.05
FITS, TIGHT, DOES_NOT_FIT = "fits", "fits, but within the allocator's reach", "does not fit"


@dataclass(frozen=True)
class StageMemory:
    """What one rank of a stage holds at its peak.

    Attributes:
        stage: The stage.
        phase: When the peak is: "forward", "backward of the head", "backward", "end of backward" or
            "step".
        bytes_by_category: Bytes at that moment, for each category that is `PREDICTED`.
        parameters: Parameters that the rank computes with.
        in_flight: Blocks whose activations it holds at once.
        context_bytes: Outside the allocator: CUDA's context and NCCL's buffers.
        gaps: What gaps add to bytes that come and go, as a share of these.
    """

    stage: Stage
    phase: str
    bytes_by_category: dict[Category, float]
    parameters: float
    in_flight: float
    context_bytes: float
    gaps: float

    @property
    def allocated_bytes(self) -> float:
        """Peak of the allocator: `torch.cuda.max_memory_allocated`."""
        return sum(self.bytes_by_category.values())

    @property
    def lasting_bytes(self) -> float:
        """Between steps: states, communication buffers and workspaces."""
        names = (Category.COMMUNICATION, Category.WORKSPACES)
        return self.state_bytes + sum(self.bytes_by_category[name] for name in names)

    @property
    def reserved_bytes(self) -> float:
        """The allocator's segments with their gaps: `torch.cuda.max_memory_reserved`.

        Gaps come with what comes and goes; lasting bytes are allocated once, in large pieces.
        """
        return self.allocated_bytes + self.gaps * (self.allocated_bytes - self.lasting_bytes)

    def reserved_on(self, gpu: Device) -> float:
        """`reserved_bytes` where the device has room for the gaps; else what it has."""
        room = gpu.memory_bytes - self.context_bytes
        return min(self.reserved_bytes, max(self.allocated_bytes, room))

    @property
    def device_bytes(self) -> float:
        """What `nvidia-smi` shows: the allocator's segments and what is outside it."""
        return self.reserved_bytes + self.context_bytes

    def fits(self, gpu: Device) -> bool:
        """Whether the device has room. Gaps do not count: near the limit they are given back."""
        return self.needed_bytes <= gpu.memory_bytes

    def tight(self, gpu: Device, headroom: float = HEADROOM) -> bool:
        """Whether gaps included it leaves less than `headroom`, a share of the device, free."""
        return self.device_bytes > (1 - headroom) * gpu.memory_bytes

    def verdict(self, gpu: Device, headroom: float = HEADROOM) -> str:
        """`FITS`, `TIGHT` or `DOES_NOT_FIT`; a tight plan runs several times slower than it could.

        Raises:
            ValueError: `headroom` is not a share between 0 and 1.
        """
        if not 0 <= headroom < 1:
            raise ValueError(
                f"headroom is {headroom}; it is the share of the device to leave free, from 0 to "
                f"below 1. Write headroom={HEADROOM}."
            )
        if not self.fits(gpu):
            return DOES_NOT_FIT
        return TIGHT if self.tight(gpu, headroom) else FITS

    @property
    def needed_bytes(self) -> float:
        """The least that a device must have: no gaps, but what is outside the allocator."""
        return self.allocated_bytes + self.context_bytes

    @property
    def state_bytes(self) -> float:
        """What lasts from step to step: parameters, gradients and optimizer state."""
        names = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        return sum(self.bytes_by_category[name] for name in names)


def memory(model: ModelShape | str, plan: Plan, batch: Batch) -> tuple[StageMemory, ...]:
    """Peak memory of each pipeline stage, first to last.

    Raises:
        ValueError: plan, model and batch do not divide, see `Plan.check`.
    """
    model = model_shape(model)
    plan.check(model, batch)
    return tuple(_stage_memory(model, plan, batch, stage) for stage in stages(model, plan))


def fullest(model: ModelShape, plan: Plan, batch: Batch, places: Sequence[Stage]) -> StageMemory:
    """`worst` of `memory`, for the `distinct` stages of a plan that is already checked."""
    return worst(tuple(_stage_memory(model, plan, batch, stage) for stage in places))


def worst(rows: tuple[StageMemory, ...]) -> StageMemory:
    """The stage that holds most. Raises ValueError where there is none."""
    if not rows:
        raise ValueError("worst: rows is empty; give what memory() found, a row for each stage.")
    return max(rows, key=lambda row: row.allocated_bytes)


def _stage_memory(model: ModelShape, plan: Plan, batch: Batch, stage: Stage) -> StageMemory:
    blocks = in_flight_blocks(plan, batch, stage)
    lasting = states(model, plan, stage) | {
        Category.WORKSPACES: calibration.WORKSPACE_BYTES + dummy_gradient_bytes(model, plan),
        Category.COMMUNICATION: buffer_bytes(plan, stage) + _received_bytes(model, plan, batch),
    }
    phases = _phases(model, plan, batch, stage, blocks)
    if frees_gradients(plan, batch):
        late = _late_gradients(stage, lasting.pop(Category.GRADIENTS))
        phases = {name: moment | {Category.GRADIENTS: late.get(name, 0.0)}
                  for name, moment in phases.items()}  # fmt: skip
    held = {name: _fill(lasting | {k: lasting.get(k, 0.0) + v for k, v in moment.items()})
            for name, moment in phases.items()}  # fmt: skip
    alone = plan.ranks == 1
    gaps = calibration.FRAGMENTATION_ALONE if alone else calibration.FRAGMENTATION
    phase = max(held, key=lambda name: sum(held[name].values()))
    return StageMemory(stage, phase, held[phase], stage.parameters, blocks, context_bytes(plan),
                       gaps)  # fmt: skip


def frees_gradients(plan: Plan, batch: Batch) -> bool:
    """Whether no gradient is held in forward: freed after each step, and one micro-batch a step."""
    return plan.rules.frees_gradients and plan.micro_batches(batch) == 1


def _late_gradients(stage: Stage, whole: float) -> dict[str, float]:
    """Gradients that a single backward pass has made by each moment."""
    share = whole / stage.parameters
    head = stage.head_parameters * share
    first = head + min(stage.layers, 1) * stage.widest_block * share
    return {"backward of the head": head, "backward": first, "end of backward": whole,
            "step": whole}  # fmt: skip


def context_bytes(plan: Plan) -> float:
    """CUDA's context, and the buffers of the plan's NCCL communicators."""
    axes = [plan.tp > 1, plan.dp * plan.cp > 1, plan.pp > 1]
    groups = sum(axes) if sum(axes) > 1 else 0  # one axis alone talks through the world's
    stages_talk = 3 * (plan.pp > 1)  # embedding, and a pair with each neighbour
    joined = plan.pp > 1 and plan.tp > 1  # the model-parallel group
    count = (plan.ranks > 1) + groups + stages_talk + joined
    return calibration.CUDA_CONTEXT_BYTES + count * calibration.COMMUNICATOR_BYTES


def _fill(amounts: dict[Category, float]) -> dict[Category, float]:
    return {name: amounts.get(name, 0.0) for name in PREDICTED}


def in_flight_blocks(plan: Plan, batch: Batch, stage: Stage) -> float:
    """Blocks whose activations a rank of the stage holds at once, over all micro-batches."""
    m, v = plan.micro_batches(batch), plan.virtual_stages
    chunks = in_flight_closed(plan.schedule, stage.index, plan.pp, m, v)
    return chunks * stage.layers / v


def on_device(plan: Plan, stage: Stage, blocks: float) -> float:
    """Of so many blocks of a stage, those whose activations stay on the device.

    All but `ON_DEVICE` go to the host; with `Plan.offload_layers` that share of the stage's blocks.
    """
    if not plan.offload_activations:
        return blocks
    some = stage.layers if plan.offload_layers is None else plan.offload_layers
    away = min(1.0, some / max(stage.layers, 1)) * blocks
    return max(min(blocks, ON_DEVICE), blocks - away)


def gathered_bytes(model: ModelShape, plan: Plan, stage: Stage) -> float:
    """Whole parameters that ZeRO-3 holds while it computes.

    The block at work and the prefetched ones; and on a stage that holds them, embedding and head.
    FSDP keeps these two from forward to backward, as part of no block; others gather them when they
    are needed, which counts where the larger is more than a block.
    """
    if plan.zero_stage < 3 or plan.shard_group == 1:
        return 0.0
    block, table = stage.widest_block, table_parameters(model, plan)
    blocks = min(plan.rules.gathered_blocks, stage.layers)
    width, each = gathered_held(plan), plan.rules.gathered_bytes
    if plan.rules.keeps_ends:
        ends = stage.embedding_parameters + stage.head_parameters
        return each * ends + width * blocks * block
    ends = table if stage.embedding or stage.head else 0.0
    return max(width * blocks * block, each * ends + width * (blocks - 1) * block)


def _reduced_bytes(plan: Plan, stage: Stage) -> float:
    """Gradients of a whole block, on their way to the ranks that keep a share of them."""
    leave = gradients_leave(plan.rules, plan.zero_stage, plan.offload)
    sharded = plan.zero_stage == 3 and (plan.shard_group > 1 or leave)
    if not plan.rules.keeps_ends or not sharded:
        return 0.0
    return plan.rules.reduce_bytes * min(stage.layers, 1) * stage.widest_block


def _phases(
    model: ModelShape, plan: Plan, batch: Batch, stage: Stage, blocks: float
) -> dict[str, dict[Category, float]]:
    """What comes on top of the lasting bytes, at each moment that can be the peak."""
    s = batch.sequence_length
    kept = stage_block_bytes(model, plan, s, stage, plan.recompute)
    tokens = plan.micro_batch * s / plan.cp
    logits = stage.loss * tokens * padded_vocabulary(model, plan) / plan.tp
    passing = stage.layers / plan.virtual_stages  # blocks of the micro-batch at work
    working = max(
        working_bytes(model, plan, s, experts)
        + block_bytes(model, plan, s, "none", experts)
        - block_bytes(model, plan, s, plan.recompute, experts)  # backward makes the rest again
        for experts in {stage.expert_layers == stage.layers > 0, stage.expert_layers > 0}
    )
    if plan.offload_activations:
        blocks, passing = (on_device(plan, stage, each) for each in (blocks, passing))
    grads = _backward_gradients(plan, stage) + _dequantized(model, plan, stage)
    deferred = 2 * logits * min(plan.rules.deferred_heads, plan.micro_batches(batch) - 1)
    gathered = gathered_bytes(model, plan, stage)
    in_backward = gathered + _reduced_bytes(plan, stage)
    return {
        "forward": {
            Category.GATHERED: gathered,
            Category.ACTIVATIONS: blocks * kept,
            Category.LOGITS_AND_LOSS: logits * logit_bytes(plan) + deferred,
            Category.TEMPORARIES: _dequantized(model, plan, stage),
        },
        "backward of the head": {
            Category.GATHERED: gathered,
            Category.ACTIVATIONS: blocks * kept,
            Category.LOGITS_AND_LOSS: deferred
            + logits * min(plan.rules.loss_bytes, LOGITS_AND_GRADIENT),
            Category.TEMPORARIES: _head_gradient_bytes(model, plan, batch, stage),
        },
        "backward": {
            Category.GATHERED: in_backward,
            Category.ACTIVATIONS: blocks * kept,
            Category.LOGITS_AND_LOSS: deferred,
            Category.TEMPORARIES: working + grads / max(passing, 1),
        },
        "end of backward": {
            Category.GATHERED: in_backward,
            Category.ACTIVATIONS: (blocks - passing + min(passing, 1)) * kept,
            Category.TEMPORARIES: working + grads,
        },
        "step": {Category.TEMPORARIES: _step_bytes(plan, stage)},
    }


def _head_gradient_bytes(model: ModelShape, plan: Plan, batch: Batch, stage: Stage) -> float:
    """The head's own gradient, or its stand-in, while logits and their gradient are still there.

    Where gradients are freed after the step it stays, and counts as one of them.
    """
    if plan.lora is not None or not stage.head or frees_gradients(plan, batch):
        return 0.0
    return plan.rules.residual_bytes * table_parameters(model, plan)


def _received_bytes(model: ModelShape, plan: Plan, batch: Batch) -> float:
    """Block inputs and their gradients that interleaving receives and keeps, one pair a chunk.

    Inferred: Megatron-LM's interleaved schedule is a nest of closures, whose lists Python frees
    late; its CI logs 2 * (v - 1) such tensors more than the states between steps.
    """
    tensor = block_bytes(model, plan, batch.sequence_length, "full")
    return 2 * (plan.virtual_stages - 1) * tensor


def _backward_gradients(plan: Plan, stage: Stage) -> float:
    if plan.lora is not None:
        return 0.0
    if plan.optimizer_in_backward:
        widest = max(stage.widest_block, stage.embedding_parameters, stage.head_parameters)
        return widest * plan.rules.gradient_bytes
    return stage.parameters * plan.rules.backward_gradient_bytes


def _dequantized(model: ModelShape, plan: Plan, stage: Stage) -> float:
    """The largest matrix, back in 16 bits while it multiplies."""
    if plan.lora is None or plan.lora.base == "bf16":
        return 0.0
    largest = max(rows * columns for rows, columns in matrix_shapes(model).values())
    if stage.head and plan.lora.quantized_head:
        largest = max(largest, model.vocabulary * model.hidden)
    return 2 * largest / plan.tp


def _step_bytes(plan: Plan, stage: Stage) -> float:
    """What the optimizer's step takes besides; on the host where the optimizer is there."""
    if plan.lora is not None or plan.offload != "none":
        return 0.0
    sharded = (plan.shard_group, expert_replicas(plan)) if plan.zero_stage >= 1 else (1, 1)
    experts = stage.expert_parameters
    shard = (stage.parameters - experts) / sharded[0] + experts / sharded[1]
    return shard * plan.rules.step_gradient_bytes
