"""Seconds of one optimizer step, from its parts.

A pipeline of stages with t_i seconds a micro-batch takes (m - 1) * max t_i for the slowest stage's
steady work and sum t_i once for filling and draining; interleaving v chunks divides the filling by
v. With equal stages that is m * t * (1 + (p - 1) / (v * m)), the bubble of Narayanan et al. 2021,
arXiv:2104.04473, section 2.2; tests hold it equal to the executed schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape, model_shape
from utils.planner import calibration
from utils.planner.block_time import (
    BlockTime,
    Parts,
    block_times,
    head_time,
    loss_time,
)
from utils.planner.cluster import Cluster
from utils.planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
    hops_across_nodes,
    in_training,
    send_seconds,
)
from utils.planner.experts import expert_replicas, replica_seconds
from utils.planner.host import activation_seconds
from utils.planner.kernels import memory_seconds
from utils.planner.layout import Batch, Plan
from utils.planner.stages import BLOCK_TENSORS, Stage, distinct, stages
from utils.planner.states import trained_parameters

# Adam on one parameter: reads gradient, master and both moments, writes the last three and the
# 16-bit copy; before that clipping reads every gradient, after it they are set to zero.
ADAM_BYTES, CLIP_BYTES = 30, 8
# DeepSpeed's CPU Adam takes about a quarter of a second for 1e9 parameters on a node's processors
# (Ren et al. 2021, arXiv:2101.06840, Table 4).
HOST_ADAM_SECONDS = 0.25e-9


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go, on the ranks of the slowest stage.

    Attributes:
        matmul: Matrix products of forward and backward passes.
        memory: Their kernels that only move data.
        recompute: Forward work done again.
        tensor_parallel: Collectives inside blocks, tensor and context parallel.
        launch: Waiting for the host to launch kernels.
        pipeline: Bubble, and sending between stages.
        data_parallel: Collectives of gradients and parameters that no compute hides, and what the
            hidden ones take from it.
        optimizer: Clipping and the update.
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


@dataclass(frozen=True)
class Pieces:
    """What stages are made of: seconds of one block, the head and the loss, for one micro-batch."""

    block: BlockTime
    head: BlockTime
    loss: BlockTime
    expert_block: BlockTime | None = None

    def forward(self, stage: Stage) -> Parts:
        """A stage's forward pass."""
        ends = self.head.forward.times(stage.head) + self.loss.forward.times(stage.loss)
        return self._blocks("forward", stage) + ends

    def backward(self, stage: Stage) -> Parts:
        """A stage's backward pass, without recomputation."""
        ends = self.head.backward.times(stage.head) + self.loss.backward.times(stage.loss)
        return self._blocks("backward", stage) + ends

    def recompute(self, stage: Stage, plan: Plan) -> Parts:
        """What a stage's backward pass computes again first."""
        some = plan.recompute_layers
        share = 1.0 if some is None or not stage.layers else min(1.0, some / stage.layers)
        return self._blocks("recompute", stage).times(share)

    def _blocks(self, name: str, stage: Stage) -> Parts:
        one: Parts = getattr(self.block, name)
        dense = one.times(stage.layers - stage.expert_layers)
        if self.expert_block is None:
            return dense
        mixed: Parts = getattr(self.expert_block, name)
        return dense + mixed.times(stage.expert_layers)


def step_time(model: ModelShape | str, cluster: Cluster, plan: Plan, batch: Batch) -> StepTime:
    """Seconds of one optimizer step.

    Raises:
        ValueError: plan, model and batch do not divide, or the plan is not of the cluster's size.
    """
    model = model_shape(model)
    plan.check(model, batch)
    check_size(plan, cluster)
    dense, mixed = block_times(model, cluster, plan, batch)
    head, loss = head_time(model, cluster, plan, batch), loss_time(model, cluster, plan, batch)
    pieces = Pieces(dense, head, loss, mixed)
    places = stages(model, plan)
    kinds = {s.kind: stage_work(model, cluster, plan, batch, s, pieces) for s in distinct(places)}
    work, m = max(kinds.values(), key=lambda w: w.total), plan.micro_batches(batch)
    all_stages = sum(kinds[stage.kind].total for stage in places)
    fill = (all_stages - work.total) / plan.virtual_stages
    sends = _sends(model, cluster, plan, batch, work.total)
    exposed, update = _step_end(model, cluster, plan, distinct(places), pieces, m)
    return StepTime(
        matmul=m * work.matmul, memory=m * (work.memory + work.accumulate),
        recompute=m * work.recompute, tensor_parallel=m * work.communication,
        launch=m * work.launch, pipeline=fill + sends, data_parallel=exposed, optimizer=update,
    )  # fmt: skip


def check_size(plan: Plan, cluster: Cluster) -> None:
    """The plan uses all GPUs of the cluster. Raises ValueError with the dp that does."""
    if plan.ranks == cluster.gpus:
        return
    dp = cluster.gpus // (plan.tp * plan.pp * plan.cp)
    advice = f"With the same tp, pp and cp, dp is {dp}" if dp else "Lower tp, pp or cp"
    raise ValueError(
        f"The plan is for {plan.ranks} GPUs (dp * tp * pp * cp = {plan.dp} * {plan.tp} * "
        f"{plan.pp} * {plan.cp}), the cluster has {cluster.gpus}. {advice}."
    )


def stage_work(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch, stage: Stage, pieces: Pieces
) -> StageWork:
    """A stage's work for one micro-batch."""
    passes = pieces.forward(stage) + pieces.backward(stage)
    recompute = pieces.recompute(stage, plan)
    count = trained_parameters(model, plan, stage)
    added = memory_seconds(cluster.device, count * plan.rules.accumulate_bytes)
    device = passes.total + recompute.total + added
    sent = activation_seconds(model, cluster, plan, batch, stage)
    back = pieces.backward(stage).total + recompute.total
    unhidden = max(0.0, sent - pieces.forward(stage).total) + max(0.0, sent - back)
    host = _host_seconds(cluster, plan) * (stage.layers + stage.head)
    waiting = host if plan.rules.host_exposed else max(0.0, host - device)
    return StageWork(
        passes.matmul, passes.memory + unhidden, recompute.total, passes.communication, waiting,
        added,
    )  # fmt: skip


def _host_seconds(cluster: Cluster, plan: Plan) -> float:
    """To launch one block's passes, the third one of recomputation included.

    Stages that exchange shapes before tensors make the host wait for the device, so that it has no
    lead left; then each collective of a block waits for the ranks of its group one by one. The
    sweep shows it over several nodes alone.
    """
    launch = plan.rules.host_seconds * (1.5 if plan.recompute == "full" else 1.0)
    waits = plan.rules.host_meets_stages and plan.pp > 1 and plan.tp > 1 and cluster.nodes > 1
    return launch + waits * plan.tp * calibration.ARRIVAL_SECONDS


def _sends(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch, work_seconds: float
) -> float:
    """Activations and their gradients between stages, on the critical path.

    Stages work in step, so each micro-batch waits for the slowest hop of all, once a pass and
    chunk; filling the pipeline passes every hop once. Interleaved stages also send from the last
    to the first; where the framework hides that behind the chunk beside it, only what is longer
    than the chunk's pass shows. Megatron-LM scatters what it sends over tp where it can.
    """
    if plan.pp == 1:
        return 0.0
    tokens = plan.micro_batch * batch.sequence_length / plan.cp
    sent = plan.rules.residual_bytes * tokens * model.hidden
    sent /= plan.tp if plan.sequence_parallel or plan.rules.scattered_sends else 1
    across = hops_across_nodes(cluster.gpus_per_node, plan.tp * plan.cp * plan.dp, plan.pp)
    hops = [send_seconds(cluster, leaves, sent) for leaves in across]
    between, back = hops[:-1], hops[-1:]
    chunks = plan.virtual_stages
    steady = max(between + back * (chunks > 1))
    if chunks > 1 and plan.rules.hides_sends:
        steady = max(0.0, steady - work_seconds / (2 * chunks))
    return 2 * (plan.micro_batches(batch) * chunks * steady + sum(between))


def _step_end(
    model: ModelShape, cluster: Cluster, plan: Plan, places: list[Stage], pieces: Pieces, m: int
) -> tuple[float, float]:
    """Exposed data-parallel communication, and the optimizer, of the stage with most of both.

    ZeRO-2 reduces the gradients of every micro-batch, since none keeps them whole; ZeRO-3 gathers
    the parameters for every forward and backward pass besides; the others do both once a step. So
    do the groups of HSDP with their shards of the gradients (PyTorch, FSDPModule:
    set_requires_all_reduce), and the replicas of plain data parallelism.
    """
    largest = max(places, key=lambda stage: trained_parameters(model, plan, stage))
    count = trained_parameters(model, plan, largest)
    forward = pieces.forward(largest).total
    backward = pieces.backward(largest).total + pieces.recompute(largest, plan).total
    dense = count - largest.expert_parameters
    gradients, parameters = data_parallel_seconds(cluster, plan, dense, largest.tensors)
    shared = replicas_seconds(cluster, plan, dense, largest.tensors)
    if largest.expert_parameters:
        theirs = replica_seconds(cluster, plan, largest.expert_parameters)
        gradients, parameters = gradients + theirs[0], parameters + theirs[1]
    rules = plan.rules
    first = _seen(parameters, forward * rules.overlap_parameters)
    hides = backward * rules.overlap_gradients
    if plan.zero_stage == 3:
        both = parameters + gradients * rules.overlap_gradients
        hides = backward * rules.overlap_parameters
        reduced = [_seen(both + extra, hides) for extra in (0.0, shared)]
        exposed = m * (first + gradients * (not rules.overlap_gradients))
    else:
        reduced = [_seen(gradients + extra, hides) for extra in (0.0, shared)]
        exposed = first
    exposed += reduced[1] + reduced[0] * (m - 1 if plan.zero_stage >= 2 else 0)
    if largest.expert_parameters and plan.zero_stage:  # as many as if sharded like the others
        count += largest.expert_parameters * (plan.shard_group / expert_replicas(plan) - 1)
    return exposed, _update_seconds(cluster, plan, count, m)


def _seen(sent: float, work: float) -> float:
    """Seconds that collectives add to the work beside them: what it does not hide, and a share of
    what it hides, since they take multiprocessors and memory bandwidth from it."""
    hidden = min(sent, work)
    return sent - hidden + calibration.CONTENTION * hidden


def _update_seconds(cluster: Cluster, plan: Plan, count: float, m: int) -> float:
    """Clipping and Adam on the device; or on the host, with the way there and back.

    Offloaded parameters also travel to the device for every forward and backward pass.
    """
    shard = count / (plan.shard_group if plan.zero_stage >= 1 else 1)
    held = count / (plan.shard_group if plan.zero_stage >= 2 else 1)
    if plan.offload == "none":
        return memory_seconds(cluster.device, ADAM_BYTES * shard + CLIP_BYTES * held)
    pcie = in_training(cluster.device.pcie)
    there = shard * (plan.rules.gradient_bytes + plan.rules.gathered_bytes) / pcie
    on_host = shard * cluster.gpus_per_node * HOST_ADAM_SECONDS
    streamed = 2 * m * shard * plan.rules.gathered_bytes / pcie * (plan.offload == "parameters")
    return there + on_host + streamed + memory_seconds(cluster.device, CLIP_BYTES * held)


def data_parallel_seconds(
    cluster: Cluster, plan: Plan, count: float, tensors: int = 1
) -> tuple[float, float]:
    """Seconds of reducing the gradients of `count` parameters, and of gathering parameters back.

    They go bucket by bucket; FSDP shards and gathers block by block, others every one of the
    `tensors` by itself. With fewer ranks in a group than there are (HSDP) the groups add up their
    shards besides, see `replicas_seconds`.
    """
    ranks, rules = plan.dp * plan.cp, plan.rules
    group = Group(plan.shard_group if plan.zero_stage else ranks, plan.tp, rules.one_port)
    width, calls = rules.reduce_bytes * count, _calls(plan, count, tensors)
    if plan.zero_stage == 0:
        return all_reduce_seconds(cluster, group, width, _buckets(plan, count)), 0.0
    gathered = rules.gathered_bytes * count
    if plan.zero_stage == 1 and rules.broadcasts:
        owners = min(group.ranks, max(1, tensors // BLOCK_TENSORS))
        gather = broadcast_seconds(cluster, group, gathered, owners)
    else:
        gather = all_gather_seconds(cluster, group, gathered, calls)
    if plan.zero_stage == 1 and rules.whole_gradients:
        everyone = Group(ranks, plan.tp, rules.one_port)
        return all_reduce_seconds(cluster, everyone, width, _buckets(plan, count)), gather
    return all_gather_seconds(cluster, group, width, calls), gather


def replicas_seconds(cluster: Cluster, plan: Plan, count: float, tensors: int = 1) -> float:
    """Seconds in which groups that shard among themselves add up their shards of the gradients."""
    ranks, rules = plan.dp * plan.cp, plan.rules
    sharing = plan.shard_group if plan.zero_stage else ranks
    if plan.zero_stage == 1 and rules.whole_gradients:
        return 0.0
    replicas = Group(ranks // sharing, plan.tp * sharing, rules.one_port)
    calls = _calls(plan, count, tensors)
    return all_reduce_seconds(cluster, replicas, rules.reduce_bytes * count / sharing, calls)


def _buckets(plan: Plan, count: float) -> float:
    return max(1.0, 2 * count / plan.rules.bucket_size_bytes)


def _calls(plan: Plan, count: float, tensors: int) -> float:
    """Collectives in which ZeRO shards or gathers `count` parameters."""
    buckets = _buckets(plan, count)
    return {"bucket": buckets, "block": max(1, tensors // BLOCK_TENSORS),
            "tensor": max(buckets, tensors)}[plan.rules.shards]  # fmt: skip
