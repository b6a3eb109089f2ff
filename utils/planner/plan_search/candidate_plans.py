"""Every plan of a space, grouped by what the time of a block depends on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from utils.catalog import ModelShape, model_shape
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.frameworks import framework
from utils.planner.layout import Plan, changed
from utils.planner.plan_search.space import SearchSpace, SearchTask, powers_of_two


@dataclass(frozen=True)
class LayoutGroup:
    """Plans that differ only in what the time of their blocks does not depend on.

    Attributes:
        base: Their common plan, with ZeRO 0 and no offload.
        variants: What each changes.
    """

    base: Plan
    variants: tuple[dict[str, Any], ...]

    def plans(self) -> list[Plan]:
        """All of them."""
        return [changed(self.base, variant) for variant in self.variants]


def candidates(
    model: ModelShape | str, cluster: Cluster, batch: Batch, space: SearchSpace
) -> Iterator[Plan]:
    """Every valid plan of the space that uses all GPUs of the cluster."""
    for group in groups(SearchTask(model_shape(model), cluster, batch, space)):
        yield from group.plans()


def groups(task: SearchTask) -> Iterator[LayoutGroup]:
    """The same, by what the time of a block depends on."""
    for tp, pp, cp in _layouts(task):
        dp = task.cluster.gpus // (tp * pp * cp)
        variants = _variants(dp * cp, pp, task.space)
        for first in _first_plans(task, (dp, tp, pp, cp)):
            for choice in _same_sizes(task, first):
                yield LayoutGroup(changed(first, choice), variants)


def _first_plans(task: SearchTask, sizes: tuple[int, int, int, int]) -> Iterator[Plan]:
    """One checked plan for each micro-batch, number of chunks and partition of a layout."""
    model, batch, space = task.model, task.batch, task.space
    conventions = space.framework
    conventions = framework(conventions) if isinstance(conventions, str) else conventions
    dp, tp, pp, cp = sizes
    for micro_batch, chunks, partition in itertools.product(
        _micro_batches(batch, dp, space), _chunks(pp, space), _partitions(pp, space)
    ):
        m = batch.sequences // (dp * micro_batch)
        if chunks > 1 and (m % pp or not _interleaves(model, pp, chunks, partition)):
            continue
        yield Plan(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            expert_tp=1 if model.num_experts else None,
            virtual_stages=chunks,
            micro_batch=micro_batch,
            partition=partition,
            sequence_parallel=tp > 1,
            attention=space.attention,
            framework=conventions,
            loss=space.loss,
            overlap_tp=space.overlap_tp and tp > 1,
        )


def _same_sizes(task: SearchTask, plan: Plan) -> Iterator[dict[str, Any]]:
    """Choices of recomputation, precision and experts for a plan of given sizes."""
    for recompute, precision, experts in itertools.product(
        _recompute(task.space), task.space.precision, _experts(task, plan)
    ):
        yield {**recompute, "precision": precision, **experts}


def _experts(task: SearchTask, plan: Plan) -> list[dict[str, Any]]:
    if task.model.num_experts is None:
        return [{}]
    ranks, width = plan.dp * plan.cp * plan.tp, task.model.expert_width
    return [
        {"ep": ep, "expert_tp": split}
        for ep, split in itertools.product(task.space.ep_sizes(task.model), task.space.expert_tp)
        if ranks % (ep * (split or plan.tp)) == 0 and width % (split or plan.tp) == 0
    ]


def _variants(ranks: int, pp: int, space: SearchSpace) -> tuple[dict[str, Any], ...]:
    """Without replicas there is nothing to shard; with stages only optimizer state, by default."""
    stages = space.zero_stages if ranks > 1 else (0,)
    return tuple(
        {"zero_stage": zero, "offload": offload}
        for zero, offload in itertools.product(stages, space.offload)
        if (zero < 2 or pp == 1 or space.shards_stages) and (offload != "parameters" or zero == 3)
    )


def _recompute(space: SearchSpace) -> list[dict[str, Any]]:
    """Flash attention keeps no scores, so that selective recomputation changes nothing."""
    chosen: list[dict[str, Any]] = []
    for recompute in space.recompute:
        if recompute == "full":
            chosen += [{"recompute": "full", "recompute_layers": n} for n in space.recompute_layers]
        elif recompute == "none" or space.attention == "unfused":
            chosen.append({"recompute": recompute})
    return chosen


def _layouts(task: SearchTask) -> Iterator[tuple[int, int, int]]:
    model, batch, gpus = task.model, task.batch, task.cluster.gpus
    for tp in (t for t in range(1, min(gpus, task.largest_tp) + 1) if gpus % t == 0):
        if model.heads % tp or model.feedforward % tp:
            continue
        for cp in (c for c in task.space.cp_sizes(batch) if gpus % (tp * c) == 0):
            if batch.sequence_length % (tp * cp):
                continue
            for pp in range(1, min(model.layers, gpus // (tp * cp)) + 1):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest == 0 and batch.sequences % dp == 0:
                    yield tp, pp, cp


def _micro_batches(batch: Batch, dp: int, space: SearchSpace) -> list[int]:
    share = batch.sequences // dp
    return [n for n in powers_of_two(min(share, space.largest_micro_batch)) if share % n == 0]


def _chunks(pp: int, space: SearchSpace) -> tuple[int, ...]:
    return space.virtual_stages if pp > 1 else (1,)


def _interleaves(model: ModelShape, pp: int, chunks: int, partition: str) -> bool:
    """Whether every stage can hold so many alike chunks; of "ends" but for embedding and head."""
    ends = 2 * (partition == "ends")
    fit = pp > 1 and pp * chunks <= model.layers and partition != "compute"
    return fit and (model.layers + ends) % (pp * chunks) == 0


def _partitions(pp: int, space: SearchSpace) -> tuple[str, ...]:
    return space.partitions if pp > 1 else space.partitions[:1]
