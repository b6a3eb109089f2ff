"""What a search is asked: a model, a cluster, a batch, and the space of plans that it combines."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import ModelShape
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.conventions import Framework
from utils.planner.layout import Plan
from utils.planner.plan_context import ClusterPlanContext

LONG_SEQUENCE = 16_384  # tokens from which context parallelism is tried unasked
LARGEST_CP = 16


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
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
        conventions = self.framework if isinstance(self.framework, str) else self.framework.name
        return conventions == "fsdp"

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


DEFAULT = SearchSpace()


@dataclass(frozen=True)
class SearchTask:
    """What a search is asked.

    Attributes:
        model, cluster, batch: What is trained, on what, by which steps.
        space: The choices to combine.
    """

    model: ModelShape
    cluster: Cluster
    batch: Batch
    space: SearchSpace = DEFAULT

    def context(self, plan: Plan) -> ClusterPlanContext:
        """A plan as an answer."""
        return ClusterPlanContext(self.model, plan, self.batch, self.cluster)

    @property
    def largest_tp(self) -> int:
        """Tensor parallelism is tried up to this."""
        return self.space.largest_tp or self.cluster.gpus_per_node

    def why_empty(self) -> str:
        """Why a space holds no plan: the first of its choices that divides nothing."""
        model, batch, gpus = self.model, self.batch, self.cluster.gpus
        if not self.space.ep_sizes(model):
            return (
                f"No ep of {self.space.ep} divides {model.num_experts} experts. Nearest: ep=None, which "
                "tries every power of two that does."
            )
        if not any(batch.sequence_length % cp == 0 for cp in self.space.cp_sizes(batch)):
            return (
                f"No cp of {self.space.cp} divides {batch.sequence_length} tokens of a sequence. "
                "Nearest: cp=None, which tries powers of two from 16,384 tokens on."
            )
        return (
            f"No layout of {gpus} GPUs divides {model.heads} heads, {model.layers} layers and "
            f"{batch.sequences} sequences. Nearest: a batch that is a multiple of {gpus}, or a "
            f"number of GPUs that divides {batch.sequences}."
        )

    def __str__(self) -> str:
        """The space in one clause, for a reader who asks what "exact" means."""
        space = self.space
        said = [
            f"tp up to {self.largest_tp}",
            "every pp",
            _listed("cp", space.cp_sizes(self.batch)),
        ]
        said += [_listed("ep", space.ep_sizes(self.model))] * bool(self.model.num_experts)
        said += [
            _listed("ZeRO", space.zero_stages),
            f"micro-batches up to {space.largest_micro_batch}",
            _listed("chunks", space.virtual_stages),
            _listed("recompute", space.recompute),
            _listed("offload", space.offload),
        ]
        said += [_listed("precision", space.precision)] * (space.precision != ("bf16",))
        return ", ".join(said)


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4 and so on up to `largest`."""
    return tuple(2**n for n in range(largest.bit_length()))


def _listed(name: str, values: tuple[object, ...]) -> str:
    return f"{name} {', '.join(str(value) for value in values)}"
