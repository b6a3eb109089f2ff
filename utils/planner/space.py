"""What a search combines: the space of plans, and every plan of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from utils.catalog import ModelShape, model_shape
from utils.planner.cluster import Cluster
from utils.planner.frameworks import Framework, framework
from utils.planner.layout import Batch, Plan, changed

LONG_SEQUENCE = 16_384  # tokens from which context parallelism is tried unasked
LARGEST_CP = 16


@dataclass(frozen=True, kw_only=True)
class Space:
    """Which choices a search combines; each tuple lists the values it tries.

    Attributes:
        zero_stages, recompute, recompute_layers, offload, partitions, precision: See `Plan`.
        cp: None for 1, and from sequences of 16,384 tokens on also 2, 4, 8 and 16.
        ep: None for 1 in a dense model, and for every power of two that divides the experts.
        expert_tp: See `Plan`; by default each expert is whole on its rank.
        largest_micro_batch: Micro-batches of 1, 2, 4 and so on up to this.
        largest_tp: Tensor parallelism up to this; None for the GPUs of a node.
        virtual_stages: Chunks a stage, where they divide.
        framework: Whose conventions hold.
        attention: "flash" or "unfused".
        loss, overlap_tp: See `Plan`; the same for all plans.
        shard_stages: Also try ZeRO-2 and 3 with pipeline stages, which shard and gather for every
            micro-batch; DeepSpeed refuses it. None: where the framework is FSDP, which does it.
    """

    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    recompute_layers: tuple[int | None, ...] = (None,)
    offload: tuple[str, ...] = ("none",)
    partitions: tuple[str, ...] = ("even",)
    precision: tuple[str, ...] = ("bf16",)
    cp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    expert_tp: tuple[int | None, ...] = (1,)
    largest_micro_batch: int = 16
    largest_tp: int | None = None
    virtual_stages: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    framework: Framework | str = "megatron"
    attention: str = "flash"
    loss: str = "whole"
    overlap_tp: bool = False
    shard_stages: bool | None = None

    @property
    def shards_stages(self) -> bool:
        """Whether ZeRO-2 and 3 are tried with pipeline stages."""
        if self.shard_stages is not None:
            return self.shard_stages
        rules = self.framework if isinstance(self.framework, str) else self.framework.name
        return rules == "fsdp"

    def cp_sizes(self, batch: Batch) -> tuple[int, ...]:
        """Context-parallel sizes that are tried for a batch."""
        if self.cp is not None:
            return self.cp
        return powers_of_two(LARGEST_CP) if batch.sequence_length >= LONG_SEQUENCE else (1,)

    def ep_sizes(self, model: ModelShape) -> tuple[int, ...]:
        """Expert-parallel sizes that are tried for a model."""
        if model.num_experts is None:
            return (1,)
        sizes = powers_of_two(model.num_experts) if self.ep is None else self.ep
        return tuple(size for size in sizes if model.num_experts % size == 0)

    def words(self, model: ModelShape, cluster: Cluster, batch: Batch) -> str:
        """The space in one clause, for a reader who asks what "exact" means."""
        said = [
            f"tp up to {self.largest_tp or cluster.gpus_per_node}", "every pp",
            _listed("cp", self.cp_sizes(batch)), _listed("ZeRO", self.zero_stages),
            f"micro-batches up to {self.largest_micro_batch}",
            _listed("chunks", self.virtual_stages), _listed("recompute", self.recompute),
            _listed("offload", self.offload),
        ]  # fmt: skip
        if model.num_experts:
            said.insert(3, _listed("ep", self.ep_sizes(model)))
        if self.precision != ("bf16",):
            said.append(_listed("precision", self.precision))
        return ", ".join(said)


DEFAULT = Space()


@dataclass(frozen=True)
class Group:
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
    model: ModelShape | str, cluster: Cluster, batch: Batch, space: Space
) -> Iterator[Plan]:
    """Every valid plan of the space that uses all GPUs of the cluster."""
    for group in groups(model_shape(model), cluster, batch, space):
        yield from group.plans()


def groups(model: ModelShape, cluster: Cluster, batch: Batch, space: Space) -> Iterator[Group]:
    """The same, by what the time of a block depends on."""
    for tp, pp, cp in _layouts(model, cluster, batch, space):
        dp = cluster.gpus // (tp * pp * cp)
        variants = _variants(dp * cp, pp, space)
        for first in _first_plans(model, batch, space, (dp, tp, pp, cp)):
            for choice in _same_sizes(model, space, first):
                yield Group(changed(first, choice), variants)


def _first_plans(
    model: ModelShape, batch: Batch, space: Space, sizes: tuple[int, int, int, int]
) -> Iterator[Plan]:
    """One checked plan for each micro-batch, number of chunks and partition of a layout."""
    rules = space.framework
    rules = framework(rules) if isinstance(rules, str) else rules
    dp, tp, pp, cp = sizes
    for micro_batch, chunks, partition in itertools.product(
        _micro_batches(batch, dp, space), _chunks(pp, space), _partitions(pp, space)
    ):
        m = batch.sequences // (dp * micro_batch)
        if chunks > 1 and (m % pp or not _interleaves(model, pp, chunks, partition)):
            continue
        yield Plan(
            dp=dp, tp=tp, pp=pp, cp=cp, expert_tp=1 if model.num_experts else None,
            virtual_stages=chunks, micro_batch=micro_batch, partition=partition,
            sequence_parallel=tp > 1, attention=space.attention, framework=rules,
            loss=space.loss, overlap_tp=space.overlap_tp and tp > 1,
        )  # fmt: skip


def _same_sizes(model: ModelShape, space: Space, plan: Plan) -> Iterator[dict[str, Any]]:
    """Choices of recomputation, precision and experts for a plan of given sizes."""
    for recompute, precision, experts in itertools.product(
        _recompute(space), space.precision, _experts(model, space, plan)
    ):
        yield {**recompute, "precision": precision, **experts}


def _experts(model: ModelShape, space: Space, plan: Plan) -> list[dict[str, Any]]:
    if model.num_experts is None:
        return [{}]
    ranks = plan.dp * plan.cp * plan.tp
    return [
        {"ep": ep, "expert_tp": split}
        for ep, split in itertools.product(space.ep_sizes(model), space.expert_tp)
        if ranks % (ep * (split or plan.tp)) == 0 and model.expert_width % (split or plan.tp) == 0
    ]


def _variants(ranks: int, pp: int, space: Space) -> tuple[dict[str, Any], ...]:
    """Without replicas there is nothing to shard; with stages only optimizer state, by default."""
    stages = space.zero_stages if ranks > 1 else (0,)
    return tuple(
        {"zero_stage": zero, "offload": offload}
        for zero, offload in itertools.product(stages, space.offload)
        if (zero < 2 or pp == 1 or space.shards_stages) and (offload != "parameters" or zero == 3)
    )


def _recompute(space: Space) -> list[dict[str, Any]]:
    """Flash attention keeps no scores, so that selective recomputation changes nothing."""
    chosen: list[dict[str, Any]] = []
    for recompute in space.recompute:
        if recompute == "full":
            chosen += [{"recompute": "full", "recompute_layers": n} for n in space.recompute_layers]
        elif recompute == "none" or space.attention == "unfused":
            chosen.append({"recompute": recompute})
    return chosen


def _layouts(
    model: ModelShape, cluster: Cluster, batch: Batch, space: Space
) -> Iterator[tuple[int, int, int]]:
    gpus, widest = cluster.gpus, space.largest_tp or cluster.gpus_per_node
    for tp in (t for t in range(1, min(gpus, widest) + 1) if gpus % t == 0):
        if model.heads % tp or model.feedforward % tp:
            continue
        for cp in (c for c in space.cp_sizes(batch) if gpus % (tp * c) == 0):
            if batch.sequence_length % (tp * cp):
                continue
            for pp in range(1, min(model.layers, gpus // (tp * cp)) + 1):
                dp, rest = divmod(gpus, tp * cp * pp)
                if rest == 0 and batch.sequences % dp == 0:
                    yield tp, pp, cp


def _micro_batches(batch: Batch, dp: int, space: Space) -> list[int]:
    share = batch.sequences // dp
    return [n for n in powers_of_two(min(share, space.largest_micro_batch)) if share % n == 0]


def _chunks(pp: int, space: Space) -> tuple[int, ...]:
    return space.virtual_stages if pp > 1 else (1,)


def _interleaves(model: ModelShape, pp: int, chunks: int, partition: str) -> bool:
    """Whether every stage can hold so many alike chunks; of "ends" but for embedding and head."""
    ends = 2 * (partition == "ends")
    fit = pp > 1 and pp * chunks <= model.layers and partition != "compute"
    return fit and (model.layers + ends) % (pp * chunks) == 0


def _partitions(pp: int, space: Space) -> tuple[str, ...]:
    return space.partitions if pp > 1 else space.partitions[:1]


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4 and so on up to `largest`."""
    return tuple(2**n for n in range(largest.bit_length()))


def _listed(name: str, values: tuple[object, ...]) -> str:
    return f"{name} {', '.join(str(value) for value in values)}"
