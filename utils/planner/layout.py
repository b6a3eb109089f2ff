"""What is planned: how a model is laid out over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from utils.catalog import ModelShape, model_shape
from utils.checked import asks_first
from utils.parallel.dims import ParallelDims
from utils.planner.adapters import Lora
from utils.planner.batch import Batch
from utils.planner.conventions import Framework
from utils.planner.frameworks import FRAMEWORKS, framework
from utils.rules import divides, keep_whole, of_kind, one_of, whole

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe")
PARTITIONS = ("even", "ends", "compute")
OFFLOADS = ("none", "optimizer", "parameters")
ATTENTIONS = ("flash", "unfused")
PRECISIONS = ("bf16", "fp8", "mxfp8")
LOSSES = ("whole", "fused", "chunked")
CHOICES: dict[str, tuple[object, ...]] = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "attention": ATTENTIONS,
    "offload": OFFLOADS,
    "precision": PRECISIONS,
    "loss": LOSSES,
    "zero_stage": (0, 1, 2, 3),
}
COUNTS = ("dp", "tp", "pp", "cp", "ep", "virtual_stages", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout: which rank holds and computes what.

    Attributes:
        dp: Data-parallel replicas.
        tp: Ranks that share each matrix (tensor parallelism).
        pp: Pipeline stages.
        cp: Ranks that share each sequence (context parallelism).
        ep: Ranks over which the experts of a block are dealt (expert parallelism). They are taken
            from the ranks of dp, cp and tp, so ep multiplies nothing.
        expert_tp: Ranks that share one expert's matrices; None for tp.
        virtual_stages: Chunks of layers that each stage holds; above 1 the schedule is interleaved
            (Narayanan et al. 2021, section 2.2).
        schedule: "1f1b" or "gpipe".
        partition: How layers are dealt to stages. "even": alike, the first stages one more where
            they do not divide. "ends": embedding and head count as a layer each. "compute":
            nanotron's, a stage is full once its matrix products pass its share. A tuple of whole
            numbers gives the layers of each stage.
        sequence_parallel: Norms, dropouts and residuals are split over the tp ranks as well
            (Korthikanti et al. 2022, section 4.2.2).
        zero_stage: 0 to 3: optimizer state, then gradients, then parameters are sharded over the
            data-parallel ranks (Rajbhandari et al. 2019). FSDP's full sharding is 3.
        shard_ranks: Ranks over which ZeRO shards; None for all dp * cp of them. Fewer is HSDP:
            sharded inside the group, replicated between groups.
        recompute: "none", "selective" (the attention scores, Korthikanti section 5) or "full"
            (every block from its input).
        recompute_layers: With "full", only so many blocks of each stage are recomputed and the
            others keep everything (Megatron-LM's "block" method); None for all of them.
        attention: "flash" keeps no scores; "unfused" keeps them all.
        dropout: Dropout of 0.1 is on, so that its masks are kept.
        micro_batch: Sequences that one rank passes through the model at once, b.
        framework: Whose conventions of precision and buffers hold, by name or your own.
        offload: "none"; "optimizer": master copy and moments live in host memory; "parameters":
            these and the sharded parameters, which needs zero_stage 3.
        offload_activations: What a block keeps goes to host memory behind the compute and comes
            back for its backward pass; two blocks stay on the device.
        offload_layers: With offload_activations, only so many blocks of each stage go to the host
            (Megatron's cpu_offloading_num_layers); None for all of them.
        precision: "bf16"; "fp8": matrix products with one scale a tensor; "mxfp8": with one scale
            for 32 elements. Embedding, head and attention stay in 16 bits; gradients and optimizer
            are the framework's. NVIDIA's published fp8 runs keep gradients in 16 bits, a fused loss
            and layers of their own on the host: framework="megatron-bridge", loss="fused", and
            `evidence.validation.bridge` for each of them.
        loss: "whole": logits are cast to float32 as the framework does; "fused": one kernel from
            16-bit logits to their gradient, in place; "chunked": head and loss an eighth of the
            tokens at a time.
        optimizer_in_backward: A parameter is updated as soon as its gradient is there, so that
            gradients never exist together; one micro-batch a step, no clipping by the global norm.
        overlap_tp: Collectives of tensor parallelism run behind the products they feed
            (Megatron-LM's --tp-comm-overlap), all but one of tp pieces.
        lora: Low-rank adapters on a frozen base; None trains every parameter.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    virtual_stages: int = 1
    schedule: str = "1f1b"
    partition: str | tuple[int, ...] = "even"
    sequence_parallel: bool = False
    zero_stage: int = 0
    shard_ranks: int | None = None
    recompute: str = "none"
    recompute_layers: int | None = None
    attention: str = "flash"
    dropout: bool = False
    micro_batch: int = 1
    framework: Framework | str = field(default="megatron")
    offload: str = "none"
    offload_activations: bool = False
    offload_layers: int | None = None
    precision: str = "bf16"
    loss: str = "whole"
    optimizer_in_backward: bool = False
    overlap_tp: bool = False
    lora: Lora | None = None

    def __post_init__(self) -> None:
        """Refuse layouts that contradict themselves. Raises ValueError with the rule."""
        keep_whole(self, "Plan", *COUNTS, optional="shard_ranks")
        for name in ("expert_tp", "recompute_layers", "offload_layers"):
            keep_whole(self, "Plan", optional=name)
        for name, choices in CHOICES.items():
            one_of(name, getattr(self, name), choices)
        if isinstance(self.partition, tuple):
            whole("partition", **{f"stage {i}": n for i, n in enumerate(self.partition)}, least=0)
        else:
            one_of("partition", self.partition, PARTITIONS)
        of_kind("Plan", framework=(self.framework, Framework, str))
        of_kind("Plan", lora=(self.lora, Lora, type(None)))
        # A search makes thousands of plans: a name as it stands in the table is not looked for.
        if isinstance(self.framework, str) and self.framework not in FRAMEWORKS:
            object.__setattr__(self, "framework", framework(self.framework).name)
        divides("shard_ranks", self.shard_group, "dp * cp", self.dp * self.cp)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.virtual_stages > 1 and (self.pp == 1 or self.schedule != "1f1b"):
            raise ValueError(
                f"virtual_stages is {self.virtual_stages}, but only 1f1b over two or more stages "
                f"interleaves; pp is {self.pp} and the schedule {self.schedule!r}. Write 1."
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel splits over tp, and tp is 1. Write False, or tp=2.")
        if self.offload == "parameters" and self.zero_stage != 3:
            raise ValueError(
                f"offload='parameters' needs sharded parameters, zero_stage 3, not "
                f"{self.zero_stage}. Write zero_stage=3 or offload='optimizer'."
            )

        self._check_combinations_of_memory()

    def _check_combinations_of_memory(self) -> None:
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(
                f"recompute_layers is {self.recompute_layers}, and recompute {self.recompute!r} "
                "recomputes no whole blocks. Write recompute='full', or leave recompute_layers out."
            )
        if self.offload_layers is not None and not self.offload_activations:
            raise ValueError(
                f"offload_layers is {self.offload_layers}, and no activations are offloaded. Write "
                "offload_activations=True, or leave offload_layers out."
            )
        if self.optimizer_in_backward and (self.zero_stage or self.offload != "none"):
            raise ValueError(
                f"optimizer_in_backward updates each parameter on its own rank, and zero_stage is "
                f"{self.zero_stage}, offload {self.offload!r}. Write zero_stage=0, offload='none'."
            )
        if self.overlap_tp and self.tp == 1:
            raise ValueError(
                "overlap_tp hides collectives of tp, and tp is 1. Write False, or tp=2."
            )
        whole = self.dp * self.cp * self.tp
        split = self.tp if self.expert_tp is None else self.expert_tp
        if self.ep * split > 1 and (self.ep > 1 or self.expert_tp is not None):
            divides("ep * expert_tp", self.ep * split, "dp * cp * tp", whole)

    @property
    def ranks(self) -> int:
        """GPUs that the plan uses: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def dims(self) -> ParallelDims:
        """Ranks along each axis; dp is divided into groups that shard states, and their replicas.

        Raises:
            ValueError: states are sharded over a part of a group of cp.
        """
        sharded = self.shard_group if self.zero_stage else self.cp
        divides("cp", self.cp, "shard_ranks", sharded)
        shard = sharded // self.cp
        return ParallelDims(
            pp=self.pp, replicate=self.dp // shard, shard=shard, cp=self.cp, tp=self.tp
        )

    @property
    def shard_group(self) -> int:
        """Ranks over which ZeRO shards states."""
        return self.dp * self.cp if self.shard_ranks is None else self.shard_ranks

    @property
    def conventions(self) -> Framework:
        """The conventions of the plan's framework."""
        return framework(self.framework) if isinstance(self.framework, str) else self.framework

    def micro_batches(self, batch: Batch) -> int:
        """Micro-batches that one replica passes through in one step, m.

        Raises:
            ValueError: the batch does not divide into them.
        """
        return batch.micro_batches(self.dp, self.micro_batch)

    def check(self, model: ModelShape | str, batch: Batch) -> None:
        """Hold the plan against a model and a batch.

        Raises:
            ValueError: something does not divide, with the rule, the numbers and what does.
        """
        model = model_shape(model)
        of_kind("plan.check", batch=(batch, Batch))
        divides("tp", self.tp, "attention heads", model.heads)
        divides("tp", self.tp, "feed-forward width", model.feedforward)
        divides("cp", self.cp, "sequence_length", batch.sequence_length)
        check_layers(self, model)
        if self.sequence_parallel:
            divides("tp * cp", self.tp * self.cp, "sequence_length", batch.sequence_length)
        ends = 2 * (self.partition == "ends")  # embedding and head, each as a layer
        if self.pp * self.virtual_stages > model.layers + ends:
            largest = "pp * virtual_stages" if self.virtual_stages > 1 else "pp"
            raise ValueError(
                f"{self.pp} stages of {self.virtual_stages} chunks need as many layers, and "
                f"{model.name} has {model.layers}. Largest {largest}: {model.layers + ends}."
            )
        if self.virtual_stages > 1:
            what = "layers, embedding and head" if ends else "layers"
            divides("pp * virtual_stages", self.pp * self.virtual_stages, what, model.layers + ends)
        m = self.micro_batches(batch)
        if self.optimizer_in_backward and m > 1:
            raise ValueError(
                f"optimizer_in_backward needs one micro-batch a step, and this plan has {m}. "
                f"Nearest: a batch of {self.dp * self.micro_batch} sequences."
            )
        if self.virtual_stages > 1:
            divides("pp, where stages interleave,", self.pp, "micro-batches", m)


def _choices_first(given: dict[str, Any]) -> None:
    """Say what may be written where another kind of value came: `recompute=True`."""
    for name, choices in CHOICES.items():
        if name in given and not isinstance(given[name], type(choices[0])):
            one_of(name, given[name], choices)


Plan.__init__ = asks_first(_choices_first)(Plan.__init__)


def changed(plan: Plan, fields: dict[str, Any]) -> Plan:
    """`dataclasses.replace` without its checks, for fields that are known to go together."""
    copy: Plan = object.__new__(Plan)
    copy.__dict__.update(plan.__dict__, **fields)
    return copy


def check_layers(plan: Plan, model: ModelShape) -> None:
    """Hold experts and a partition by hand against the model. Raises ValueError with the rule."""
    if model.num_experts is None and (plan.ep > 1 or plan.expert_tp is not None):
        raise ValueError(
            f"ep is {plan.ep} and {model.name} has no experts. Write ep=1, or a model with "
            "num_experts."
        )
    if model.num_experts is not None:
        divides("ep", plan.ep, f"experts of {model.name}", model.num_experts)
        split = plan.tp if plan.expert_tp is None else plan.expert_tp
        divides("expert_tp", split, "width of an expert", model.expert_width)
        if plan.lora is not None:
            raise ValueError(
                f"lora adapts dense blocks, and {model.name} has {model.num_experts} experts. Write "
                "lora=None, or a dense model."
            )
    counts = plan.partition
    if isinstance(counts, tuple):
        if len(counts) != plan.pp or sum(counts) != model.layers or plan.virtual_stages > 1:
            raise ValueError(
                f"partition deals {sum(counts)} layers to {len(counts)} stages; the plan has "
                f"{plan.pp} stages without interleaving and {model.name} {model.layers} layers. "
                "Write one whole number a stage that add up, or 'even'."
            )
