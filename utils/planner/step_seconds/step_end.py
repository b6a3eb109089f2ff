"""The end of a step: data-parallel collectives of gradients and parameters, and the optimizer."""

from __future__ import annotations

from utils.planner import calibration
from utils.planner.experts import expert_replicas, expert_tp
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.stages import BLOCK_TENSORS, Stage
from utils.planner.step_seconds.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    bandwidth_in_training,
    broadcast_seconds,
)
from utils.planner.step_seconds.kernels import memory_seconds
from utils.planner.step_seconds.pass_seconds import BlockTime

# Adam on one parameter: reads gradient, master and both moments, writes the last three and the
# 16-bit copy; before that clipping reads every gradient, after it they are set to zero.
ADAM_BYTES, CLIP_BYTES = 30, 8
# DeepSpeed's CPU Adam takes about a quarter of a second for 1e9 parameters on a node's processors
# (Ren et al. 2021, arXiv:2101.06840, Table 4).
HOST_ADAM_SECONDS = 0.25e-9


def step_end(context: ClusterPlanContext, stage: Stage, passes: BlockTime) -> tuple[float, float]:
    """Seconds of data-parallel communication that no compute hides, and of the optimizer.

    ZeRO-2 reduces the gradients of every micro-batch, since none keeps them whole; ZeRO-3 gathers
    the parameters for every forward and backward pass besides; the others do both once a step. So
    do the groups of HSDP with their shards of the gradients (PyTorch, FSDPModule:
    set_requires_all_reduce), and the replicas of plain data parallelism.

    Args:
        context: What is trained, how and on what.
        stage: Of one rank.
        passes: Of one micro-batch.
    """
    plan, conventions, m = context.plan, context.conventions, context.micro_batches
    forward, backward = passes.forward.total, passes.backward.total + passes.recompute.total
    count, experts = context.trained[stage.kind], stage.expert_parameters
    gradients, parameters, shared = data_parallel_seconds(context, count - experts, stage.tensors)
    if experts:
        theirs = expert_replica_seconds(context, experts)
        gradients, parameters = gradients + theirs[0], parameters + theirs[1]
    window = _beside(plan)
    first = _seen(parameters, window * forward * conventions.overlap_parameters)
    hides = window * backward * conventions.overlap_gradients
    if plan.zero_stage == 3:
        both = parameters + gradients * conventions.overlap_gradients
        hides = backward * conventions.overlap_parameters
        reduced = [_seen(both + extra, hides) for extra in (0.0, shared)]
        exposed = m * (first + gradients * (not conventions.overlap_gradients))
    else:
        reduced = [_seen(gradients + extra, hides) for extra in (0.0, shared)]
        exposed = first
    exposed += reduced[1] + reduced[0] * (m - 1 if plan.zero_stage >= 2 else 0)
    if experts and plan.zero_stage:  # as many as if sharded like the others
        count += experts * (plan.shard_group / expert_replicas(plan) - 1)
    return exposed, _update_seconds(context, count)


def _beside(plan: Plan) -> float:
    """Passes of one micro-batch that gradients are reduced beside, and parameters gathered.

    Where stages interleave, chunks finish one after another: each sends while the others pass their
    last group of micro-batches, as many as there are stages (Megatron-LM, schedules.py, grad_sync_func
    of a chunk's last micro-batch; Megatron-Bridge's performance guide on VPP).
    """
    v = plan.virtual_stages
    return (1 + plan.pp * (v - 1)) / v if plan.zero_stage < 2 else 1.0


def _seen(sent: float, work: float) -> float:
    """Seconds that collectives add to the work beside them: what it does not hide, and a share of
    what it hides, since they take multiprocessors and memory bandwidth from it."""
    hidden = min(sent, work)
    return sent - hidden + calibration.CONTENTION * hidden


def _update_seconds(context: ClusterPlanContext, count: float) -> float:
    """Clipping and Adam on the device; or on the host, with the way there and back.

    Offloaded parameters also travel to the device for every forward and backward pass.
    """
    plan, conventions, gpu = context.plan, context.conventions, context.gpu
    shard = count / (plan.shard_group if plan.zero_stage >= 1 else 1)
    held = count / (plan.shard_group if plan.zero_stage >= 2 else 1)
    if plan.offload == "none":
        return memory_seconds(gpu, ADAM_BYTES * shard + CLIP_BYTES * held)
    pcie = bandwidth_in_training(gpu.host_link)
    there = shard * (conventions.gradient_bytes + conventions.gathered_bytes) / pcie
    on_host = shard * context.cluster.gpus_per_node * HOST_ADAM_SECONDS
    streamed = 2 * context.micro_batches * shard * conventions.gathered_bytes / pcie
    streamed *= plan.offload == "parameters"
    return there + on_host + streamed + memory_seconds(gpu, CLIP_BYTES * held)


def data_parallel_seconds(
    context: ClusterPlanContext, count: float, tensors: int = 1
) -> tuple[float, float, float]:
    """Seconds of reducing gradients, gathering parameters back, and adding up between groups.

    They go bucket by bucket; FSDP shards and gathers block by block, others every one of the
    `tensors` by itself. With fewer ranks in a group than there are (HSDP) the groups add up their
    shards of the gradients besides.
    """
    cluster, plan, conventions = context.cluster, context.plan, context.conventions
    buckets, calls = _buckets(plan, count), _calls(plan, count, tensors)
    ranks, width = plan.dp * plan.cp, conventions.reduce_bytes * count
    everyone = Group(ranks, plan.tp, conventions.one_port)
    if plan.zero_stage == 0:
        return all_reduce_seconds(cluster, everyone, width, buckets), 0.0, 0.0
    sharing, gathered = plan.shard_group, context.gathered_width * count
    group = Group(sharing, plan.tp, conventions.one_port)
    if plan.zero_stage == 1 and conventions.broadcasts:
        owners = min(sharing, max(1, tensors // BLOCK_TENSORS))
        gather = broadcast_seconds(cluster, group, gathered, owners)
    else:
        gather = all_gather_seconds(cluster, group, gathered, calls)
    if plan.zero_stage in (1, 2) and conventions.whole_gradients:
        return all_reduce_seconds(cluster, everyone, width, buckets), gather, 0.0
    replicas = Group(ranks // sharing, plan.tp * sharing, conventions.one_port)
    between = all_reduce_seconds(cluster, replicas, width / sharing, calls)
    return all_gather_seconds(cluster, group, width, calls), gather, between


def expert_replica_seconds(context: ClusterPlanContext, count: float) -> tuple[float, float]:
    """Seconds of reducing the gradients of `count` expert parameters, and of gathering them back."""
    plan, cluster, conventions = context.plan, context.cluster, context.conventions
    ranks = expert_replicas(plan)
    if ranks == 1 or not count:
        return 0.0, 0.0
    group = Group(ranks, stride=plan.ep * expert_tp(plan), one_port=conventions.one_port)
    width, gathered = conventions.reduce_bytes, context.gathered_width
    calls = _buckets(plan, count)
    if plan.zero_stage == 0:
        return all_reduce_seconds(cluster, group, width * count, calls), 0.0
    return (
        all_gather_seconds(cluster, group, width * count, calls),
        all_gather_seconds(cluster, group, gathered * count, calls),
    )


def _buckets(plan: Plan, count: float) -> float:
    return max(1.0, 2 * count / plan.conventions.bucket_size_bytes)


def _calls(plan: Plan, count: float, tensors: int) -> float:
    """Collectives in which ZeRO shards or gathers `count` parameters.

    ZeRO-3 passes on a block whole where that is more than a bucket (Megatron-Bridge's performance
    guide on FSDP: the collectives of each layer run beside its work).
    """
    buckets, blocks = _buckets(plan, count), max(1, tensors // BLOCK_TENSORS)
    if plan.zero_stage == 3:
        buckets = min(buckets, blocks)
    calls = {"bucket": buckets, "block": blocks, "tensor": max(buckets, tensors)}
    return calls[plan.conventions.shards]
