"""`search`: the best plan of all, exactly, and fast because most are ruled out by a bound.

Every combination is looked at. Two bounds, each below what `estimate` would say, spare most of the
work: the lasting bytes of the fullest stage rule out what cannot fit, and the time of the blocks
alone, with the bubble, rules out what cannot be faster than a plan already found. Tests hold the
answer equal to that of trying everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from utils.catalog import ModelShape, model_shape
from utils.catalog.rules import of_kind, one_of
from utils.planner.block_time import block_time
from utils.planner.cluster import Cluster
from utils.planner.estimate import Estimate, estimate
from utils.planner.frameworks import Framework, framework
from utils.planner.layout import Batch, Plan
from utils.planner.memory import context_bytes, fullest
from utils.planner.schedules import bubble_closed
from utils.planner.stages import Stage, distinct, stages
from utils.planner.states import buffer_bytes, states

OBJECTIVES = ("seconds", "bytes")
Placed = dict[tuple[int, int], list[Stage]]  # by tp and pp


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which choices a search combines; each tuple lists the values it tries.

    Attributes:
        zero_stages, recompute, offload, cp: See `Plan`.
        largest_micro_batch: Micro-batches of 1, 2, 4 and so on up to this.
        largest_tp: Tensor parallelism up to this; None for the GPUs of a node.
        virtual_stages: Chunks a stage, where they divide.
        framework: Whose conventions hold.
        attention: "flash" or "unfused".
        shard_stages: Also try ZeRO-2 and 3 with pipeline stages, which shard and gather for every
            micro-batch; DeepSpeed refuses it, FSDP does it.
    """

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[str, ...] = ("none",)
    cp: tuple[int, ...] = (1,)
    largest_micro_batch: int = 16
    largest_tp: int | None = None
    virtual_stages: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    framework: Framework | str = "megatron"
    attention: str = "flash"
    shard_stages: bool = False


@dataclass(frozen=True)
class Plans:
    """What a search found.

    Attributes:
        best: The best plan that fits; None where none does.
        pareto: Plans that fit and that no other beats in both seconds and bytes, fastest first.
        closest: Where none fits, the plans that lack least, each of another layout.
        considered: Combinations looked at.
        estimated: Those that no bound had ruled out.
    """

    best: Estimate | None
    pareto: tuple[Estimate, ...]
    closest: tuple[Estimate, ...]
    considered: int
    estimated: int


def candidates(
    model: ModelShape | str, cluster: Cluster, batch: Batch, space: Space
) -> Iterator[Plan]:
    """Every valid plan of the space that uses all GPUs of the cluster."""
    model = model_shape(model)
    rules = space.framework
    rules = framework(rules) if isinstance(rules, str) else rules
    for tp, pp, cp in _layouts(model, cluster, batch, space):
        dp = cluster.gpus // (tp * pp * cp)
        for micro_batch, chunks in itertools.product(
            _micro_batches(batch, dp, space), _chunks(model, pp, space)
        ):
            m = batch.sequences // (dp * micro_batch)
            if chunks > 1 and m % pp:
                continue
            base = Plan(
                dp=dp, tp=tp, pp=pp, cp=cp, virtual_stages=chunks, micro_batch=micro_batch,
                sequence_parallel=tp > 1, attention=space.attention, framework=rules,
            )  # fmt: skip
            for zero, recompute, offload in itertools.product(
                _zero_stages(dp * cp, pp, space), _recompute(space), space.offload
            ):
                if offload != "parameters" or zero == 3:
                    yield replace(base, zero_stage=zero, recompute=recompute, offload=offload)


def _zero_stages(ranks: int, pp: int, space: Space) -> list[int]:
    """Without replicas there is nothing to shard; with stages only optimizer state, by default."""
    if ranks == 1:
        return [0]
    return [z for z in space.zero_stages if z < 2 or pp == 1 or space.shard_stages]


def _recompute(space: Space) -> list[str]:
    """Flash attention keeps no scores, so that selective recomputation changes nothing."""
    return [r for r in space.recompute if r != "selective" or space.attention == "unfused"]


def _layouts(
    model: ModelShape, cluster: Cluster, batch: Batch, space: Space
) -> Iterator[tuple[int, int, int]]:
    gpus, widest = cluster.gpus, space.largest_tp or cluster.gpus_per_node
    for tp in (t for t in range(1, min(gpus, widest) + 1) if gpus % t == 0):
        if model.heads % tp or model.feedforward % tp:
            continue
        for cp in (c for c in space.cp if gpus % (tp * c) == 0):
            if batch.sequence_length % (tp * cp):
                continue
            for pp in range(1, min(model.layers, gpus // (tp * cp)) + 1):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest == 0 and batch.sequences % dp == 0:
                    yield tp, pp, cp


def _micro_batches(batch: Batch, dp: int, space: Space) -> list[int]:
    share, sizes, size = batch.sequences // dp, [], 1
    while size <= min(share, space.largest_micro_batch):
        if share % size == 0:
            sizes.append(size)
        size *= 2
    return sizes


def _chunks(model: ModelShape, pp: int, space: Space) -> list[int]:
    if pp == 1:
        return [1]
    return [v for v in space.virtual_stages if v == 1 or model.layers % (pp * v) == 0]


def search(
    model: ModelShape | str,
    cluster: Cluster,
    batch: Batch,
    objective: str = "seconds",
    space: Space = Space(),
) -> Plans:
    """The best plan for a model, a cluster and a batch.

    Args:
        model: What is trained: a shape, or a name of the catalog.
        cluster: On what; every plan uses all of it.
        batch: The global batch.
        objective: "seconds" of a step (so dollars as well), or "bytes" of the fullest GPU.
        space: The choices to combine.

    Raises:
        ValueError: an unknown objective, or no combination is even valid.
    """
    model = model_shape(model)
    of_kind("search", cluster=(cluster, Cluster), batch=(batch, Batch), space=(space, Space))
    one_of("objective", objective, OBJECTIVES)
    front = _Front()
    plans = list(candidates(model, cluster, batch, space))
    if not plans:
        raise ValueError(
            f"No layout of {cluster.gpus} GPUs divides {model.heads} heads, {model.layers} layers "
            f"and {batch.sequences} sequences. Nearest: a batch that is a multiple of "
            f"{cluster.gpus}, or a number of GPUs that divides {batch.sequences}."
        )
    blocks: dict[tuple[int, int, int, str], float] = {}
    for plan in plans:
        if _alike(plan) not in blocks:
            blocks[_alike(plan)] = block_time(model, cluster, plan, batch).total
    bounded = sorted(
        ((least_seconds(model, plan, batch, blocks[_alike(plan)]), plan) for plan in plans),
        key=_first,
    )
    estimated, placed = 0, _placed(model, plans)
    for seconds, plan in bounded:
        places = placed[plan.tp, plan.pp]
        lasting = least_bytes(model, plan, places)
        if lasting > cluster.device.memory_bytes or front.beats(seconds, lasting):
            continue
        needed = fullest(model, plan, batch, places).needed_bytes
        if needed <= cluster.device.memory_bytes and not front.beats(seconds, needed):
            estimated += 1
            front.add(estimate(model, cluster, plan, batch), needed)
    pareto = front.sorted()
    closest = () if pareto else _closest(model, cluster, batch, plans, placed)
    best = None
    if pareto:
        best = pareto[0] if objective == "seconds" else pareto[-1]
    return Plans(best, pareto, closest, len(plans), estimated)


def _first(pair: tuple[float, Plan]) -> float:
    return pair[0]


class _Front:
    """Plans that no other beats in both seconds and bytes."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float, Estimate]] = []

    def beats(self, seconds: float, needed: float) -> bool:
        """Whether some plan is at least as good in both, so that a plan like this cannot enter."""
        return any(s <= seconds and b <= needed for s, b, _ in self._points)

    def add(self, found: Estimate, needed: float) -> None:
        """Let a plan in, and those out that it beats."""
        seconds = found.step_seconds
        if not self.beats(seconds, needed):
            kept = [p for p in self._points if not (seconds <= p[0] and needed <= p[1])]
            self._points = [*kept, (seconds, needed, found)]

    def sorted(self) -> tuple[Estimate, ...]:
        """Fastest first, which is largest first."""
        return tuple(point[2] for point in sorted(self._points, key=lambda p: p[:2]))


def _placed(model: ModelShape, plans: list[Plan]) -> Placed:
    """The distinct stages of each (tp, pp): nothing else of a search's plans changes them."""
    placed: Placed = {}
    for plan in plans:
        if (plan.tp, plan.pp) not in placed:
            placed[plan.tp, plan.pp] = distinct(stages(model, plan))
    return placed


def _closest(
    model: ModelShape, cluster: Cluster, batch: Batch, plans: list[Plan], placed: Placed
) -> tuple[Estimate, ...]:
    """The plans that lack least, three of different layouts."""
    least: dict[tuple[int, int, int], tuple[float, Plan]] = {}
    for plan in plans:
        layout, places = (plan.tp, plan.pp, plan.cp), placed[plan.tp, plan.pp]
        needed = fullest(model, plan, batch, places).needed_bytes
        if layout not in least or needed < least[layout][0]:
            least[layout] = (needed, plan)
    nearest = sorted(least.values(), key=lambda pair: pair[0])[:3]
    return tuple(estimate(model, cluster, plan, batch) for _, plan in nearest)


def least_bytes(model: ModelShape, plan: Plan, places: Sequence[Stage]) -> float:
    """Below what the fullest of the stages needs: its states, buffers and context."""
    return context_bytes(plan) + max(
        sum(states(model, plan, stage).values()) + buffer_bytes(plan, stage) for stage in places
    )


def least_seconds(model: ModelShape, plan: Plan, batch: Batch, block_seconds: float) -> float:
    """Below the step time: the blocks of an average stage, and the bubble that they leave."""
    m = plan.micro_batches(batch)
    bubble = bubble_closed(plan.pp, m, plan.virtual_stages)
    rounding = 1 - 1e-9
    return m * block_seconds * model.layers / plan.pp * (1 + bubble) * rounding


def _alike(plan: Plan) -> tuple[int, int, int, str]:
    """What the time of a block depends on, within one search."""
    return plan.tp, plan.cp, plan.micro_batch, plan.recompute
