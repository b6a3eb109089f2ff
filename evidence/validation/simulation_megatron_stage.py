"""One rank of any pipeline stage of a Megatron-LM plan, simulated whole: all layers, all passes."""

from __future__ import annotations

from evidence.validation.simulation_megatron import Rank
from evidence.validation.simulation_megatron_step import share_step
from utils.catalog import ModelShape, model_shape
from utils.memory import Category, Measurement
from utils.planner import Plan
from utils.planner.schedules import schedule_actions
from utils.planner.stages import padded_vocabulary

STATES = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.BUFFERS)  # gradients are a buffer
KEPT = (Category.ACTIVATIONS, Category.INPUTS)  # a chunk's input arrives from the stage before


def megatron_stage(
    model: ModelShape | str, plan: Plan, stage: int, *, length: int, device: str = "A100 80GB"
) -> Measurement:
    """Simulate one step of a rank of `stage`, with as many micro-batches as fill the pipeline.

    More of them change nothing: what is in flight is what it was. `evidence.validation`'s rank of
    Megatron-LM says what is kept, and why.

    Args:
        model: of the GPT family.
        plan: with tp, pp, virtual_stages, sequence_parallel, recompute, attention and dropout.
        stage: which, from 0.
        length: tokens of a sequence.
        device: a GPU of the catalog.

    Raises:
        ValueError: the layers do not divide over the chunks, or there is no such stage.
    """
    shape = model_shape(model)
    chunks = plan.pp * plan.virtual_stages
    if shape.layers % chunks or not 0 <= stage < plan.pp:
        raise ValueError(
            f"Stage {stage} of {plan.pp}, in {plan.virtual_stages} chunk(s) each: {shape.layers} "
            f"layers must divide over {chunks} chunks, and stages go from 0 to {plan.pp - 1}."
        )
    scores = {"none": "kept", "selective": "recomputed"}.get(plan.recompute, "kept")
    rank = Rank(
        chunks=plan.virtual_stages,
        layers=shape.layers // chunks,
        hidden=shape.hidden,
        heads=shape.heads,
        groups=shape.key_value_heads,
        feedforward=shape.feedforward,
        vocabulary=padded_vocabulary(shape, plan),
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        dp=plan.dp,
        first=stage == 0,
        last=stage == plan.pp - 1,
        dropout=0.1 * plan.dropout,
        scores="flash" if plan.attention == "flash" else scores,
    )
    m = _filling(plan, stage)
    passes = schedule_actions(plan.schedule, plan.pp, m, plan.virtual_stages)[stage]
    return share_step(rank, passes, plan.micro_batch, length, device)


def _filling(plan: Plan, stage: int) -> int:
    """The fewest rounds of micro-batches after which as much is in flight as ever will be."""
    p, v = plan.pp, plan.virtual_stages
    warm_up = 2 * (p - stage - 1) + (v - 1) * p if v > 1 else p - stage - 1
    return p if p * v > warm_up else 2 * p


def states_and_kept(found: Measurement) -> tuple[int, int]:
    """Bytes at the peak that last from step to step, and that wait for backward."""
    held = found.breakdown
    return sum(held.get(c, 0) for c in STATES), sum(held.get(c, 0) for c in KEPT)
