"""Seconds of one optimizer step, from its parts.

A pipeline of stages with t_i seconds a micro-batch takes (m - 1) * max t_i for the slowest stage's
steady work and sum t_i once for filling and draining; interleaving v chunks divides the filling by
v. With equal stages that is m * t * (1 + (p - 1) / (v * m)), the bubble of Narayanan et al. 2021,
arXiv:2104.04473, section 2.2; tests hold it equal to the executed schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.catalog import ModelShape, model_shape
from utils.planner import calibration
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.launches import LAUNCH_SECONDS
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext, PlanContext
from utils.planner.stages import Stage
from utils.planner.step_seconds.block_time import block_times, head_time, loss_time
from utils.planner.step_seconds.collectives import (
    bandwidth_in_training,
    hops_across_nodes,
    send_seconds,
)
from utils.planner.step_seconds.kernels import memory_seconds
from utils.planner.step_seconds.pass_seconds import BlockTime
from utils.planner.step_seconds.step_end import step_end


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go, on the ranks of the slowest stage.

    Attributes:
        matmul: Matrix products of forward and backward passes.
        memory: Their kernels that only move data, and waiting for activations from the host.
        recompute: Forward work done again.
        tensor_parallel: Collectives inside blocks, of tensor and context parallelism and of experts,
            in the first forward and in backward; those of recomputation are in `recompute`.
        launch: Waiting for the host to launch kernels.
        pipeline: Bubble, and sending between stages.
        data_parallel: Collectives of gradients and parameters that no compute hides, and what the
            hidden ones take from it.
        optimizer: Clipping and the update, and parameters that are streamed from the host.
    """

    matmul: float
    memory: float
    recompute: float
    tensor_parallel: float
    launch: float
    pipeline: float
    data_parallel: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class StageWork:
    """One stage, one micro-batch: its parts, in seconds."""

    matmul: float
    memory: float
    recompute: float
    communication: float
    launch: float
    accumulate: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())


def step_time(model: ModelShape | str, cluster: Cluster, plan: Plan, batch: Batch) -> StepTime:
    """Seconds of one optimizer step.

    Raises:
        ValueError: plan, model and batch do not divide, or the plan is not of the cluster's size.
    """
    context = ClusterPlanContext(model_shape(model), plan, batch, cluster)
    context.check()
    return time_of_step(context)


def time_of_step(context: ClusterPlanContext) -> StepTime:
    """`step_time` of a context that is already checked."""
    dense, mixed = block_times(context)
    pieces = dense, mixed, loss_time(context), head_time(context)
    times = {
        stage.kind: _stage_time(context.plan, stage, pieces) for stage in context.distinct_stages
    }
    kinds = {
        stage.kind: _stage_work(context, stage, times[stage.kind])
        for stage in context.distinct_stages
    }
    work, m = max(kinds.values(), key=lambda w: w.total), context.micro_batches
    all_stages = sum(kinds[stage.kind].total for stage in context.stages)
    fill = (all_stages - work.total) / context.plan.virtual_stages
    sends = _sends(context, work.total)
    largest = max(context.distinct_stages, key=lambda stage: context.trained[stage.kind])
    exposed, update = step_end(context, largest, times[largest.kind])
    return StepTime(
        matmul=m * work.matmul,
        memory=m * (work.memory + work.accumulate),
        recompute=m * work.recompute,
        tensor_parallel=m * work.communication,
        launch=m * work.launch,
        pipeline=fill + sends,
        data_parallel=exposed,
        optimizer=update,
    )


def _stage_time(
    plan: Plan, stage: Stage, pieces: tuple[BlockTime, BlockTime | None, BlockTime, BlockTime]
) -> BlockTime:
    """A stage's passes for one micro-batch, from a block, one with experts, the head and the loss."""
    dense, mixed, loss, head = pieces
    blocks = dense.times(stage.layers - stage.expert_layers)
    if mixed:
        blocks += mixed.times(stage.expert_layers)
    if plan.recompute_layers is not None and stage.layers:
        share = min(1.0, plan.recompute_layers / stage.layers)
        blocks = replace(blocks, recompute=blocks.recompute.times(share))
    return blocks + (head.times(stage.head) + loss.times(stage.loss))


def _stage_work(context: ClusterPlanContext, stage: Stage, time: BlockTime) -> StageWork:
    """A stage's work for one micro-batch, with what the host and the link to it add."""
    passes, recompute = time.forward + time.backward, time.recompute
    accumulated = context.trained[stage.kind] * context.conventions.accumulate_bytes
    added = memory_seconds(context.gpu, accumulated)
    device = passes.total + recompute.total + added
    sent, back = _away_seconds(context, stage), time.backward.total + recompute.total
    unhidden = max(0.0, sent - time.forward.total) + max(0.0, sent - back)
    host = _host_seconds(context) * (stage.layers + stage.head)
    waiting = host if context.conventions.host_exposed else max(0.0, host - device)
    if context.conventions.launches is not None:
        launching = launch_seconds(context, stage)
        waiting = max(0.0, launching[0] - time.forward.total)
        waiting += max(0.0, launching[1] - back - added)
    return StageWork(
        matmul=passes.matmul,
        memory=passes.memory + unhidden,
        recompute=recompute.total,
        communication=passes.communication,
        launch=waiting,
        accumulate=added,
    )


def _away_seconds(context: ClusterPlanContext, stage: Stage) -> float:
    """To send one micro-batch's activations of a stage to the host, one direction."""
    plan = context.plan
    if not plan.offload_activations:
        return 0.0
    some = stage.layers if plan.offload_layers is None else plan.offload_layers
    size = min(some, stage.layers) * context.activations.kept[stage.kind]
    return size / bandwidth_in_training(context.gpu.host_link)


def launch_seconds(context: PlanContext, stage: Stage) -> tuple[float, float]:
    """To launch a stage's forward and backward pass of one micro-batch, operation by operation.

    Checkpointing launches the forward pass of its blocks once more in backward. Waiting is counted
    pass by pass: the loss is read between them, or the optimizer's step ends both.
    """
    plan, launches = context.plan, context.conventions.launches
    if launches is None:
        return 0.0, 0.0
    forward, backward = context.launched
    some = stage.layers
    if plan.recompute_layers is not None:
        some = min(plan.recompute_layers, stage.layers)
    again = some * forward * (plan.recompute == "full")
    ends = launches.ends * (stage.embedding + stage.head) / 2
    first = stage.layers * forward + ends
    return first * LAUNCH_SECONDS, (stage.layers * backward + again + ends) * LAUNCH_SECONDS


def _host_seconds(context: ClusterPlanContext) -> float:
    """To launch one block's passes, the third one of recomputation included.

    Stages that exchange shapes before tensors make the host wait for the device, so that it has no
    lead left; then each collective of a block waits for the ranks of its group one by one. The
    sweep shows it over several nodes alone.
    """
    plan, conventions = context.plan, context.conventions
    launch = conventions.host_seconds * (1.5 if plan.recompute == "full" else 1.0)
    waits = (
        conventions.host_meets_stages and plan.pp > 1 and plan.tp > 1 and context.cluster.nodes > 1
    )
    return launch + waits * plan.tp * calibration.ARRIVAL_SECONDS


def _sends(context: ClusterPlanContext, work_seconds: float) -> float:
    """Activations and their gradients between stages, on the critical path.

    Stages work in step, so each micro-batch waits for the slowest hop of all, once a pass and
    chunk; filling the pipeline passes every hop once. Interleaved stages also send from the last
    to the first; where the framework hides that behind the chunk beside it, only what is longer
    than the chunk's pass shows. Megatron-LM scatters what it sends over tp where it can.
    """
    plan, conventions, cluster = context.plan, context.conventions, context.cluster
    if plan.pp == 1:
        return 0.0
    sent = conventions.residual_bytes * context.rank_tokens * context.model.hidden
    sent /= plan.tp if plan.sequence_parallel or conventions.scattered_sends else 1
    across = hops_across_nodes(cluster.gpus_per_node, plan.tp * plan.cp * plan.dp, plan.pp)
    hops = [send_seconds(cluster, leaves, sent) for leaves in across]
    between, back = hops[:-1], hops[-1:]
    chunks = plan.virtual_stages
    steady = max(between + back * (chunks > 1))
    if chunks > 1 and conventions.hides_sends:
        steady = max(0.0, steady - work_seconds / (2 * chunks))
    return 2 * (context.micro_batches * chunks * steady + sum(between))
