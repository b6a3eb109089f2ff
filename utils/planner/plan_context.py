"""What a plan is held against, in one object, with what every figure of it asks for.

All of the planner's own functions take it: from a plan to a table there is one way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from utils.catalog import Device, ModelShape
from utils.planner.activations import Activations
from utils.planner.adapters import adapter_parameters, matrix_shapes
from utils.planner.batch import Batch
from utils.planner.cluster import Cluster
from utils.planner.conventions import Framework
from utils.planner.experts import shared_model
from utils.planner.fp8 import FP8_COPIES, kept_in_fp8
from utils.planner.layout import Plan, changed
from utils.planner.schedules import in_flight_closed
from utils.planner.stages import Kind, Stage, distinct, padded_vocabulary, stages
from utils.rules import nearest_divisors


@dataclass(frozen=True)
class PlanContext:
    """A model, its plan and its batch: what ranks hold and send, on whatever machines.

    Attributes:
        model: What is trained.
        plan: How it is laid out.
        batch: The global batch of one optimizer step.

    What follows from them is computed once, and `varied` hands it on: nothing that is cached here
    depends on ZeRO's stage or on offload.
    """

    model: ModelShape
    plan: Plan
    batch: Batch

    def check(self) -> None:
        """Raises ValueError where plan, model and batch do not divide, see `Plan.check`."""
        self.plan.check(self.model, self.batch)

    @cached_property
    def conventions(self) -> Framework:
        """The conventions of the plan's framework."""
        return self.plan.conventions

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline's stages, first to last."""
        return stages(self.model, self.plan)

    @cached_property
    def distinct_stages(self) -> tuple[Stage, ...]:
        """Of stages that hold and do the same the first, which holds most."""
        return distinct(self.model, self.plan)

    @cached_property
    def trained(self) -> dict[Kind, float]:
        """Parameters of one rank of each kind of stage that get gradients: all, or the adapters."""
        lora = self.plan.lora
        if lora is None:
            return {stage.kind: stage.parameters for stage in self.distinct_stages}
        each = adapter_parameters(self.model, lora)
        return {
            stage.kind: each * stage.layers / self.model.layers / self.plan.tp
            for stage in self.distinct_stages
        }

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches that one replica passes through in one step, m."""
        return self.plan.micro_batches(self.batch)

    @cached_property
    def rank_tokens(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.plan.micro_batch * self.batch.sequence_length / self.plan.cp

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the embedding, padded, so that tp divides them."""
        return padded_vocabulary(self.model, self.plan)

    @cached_property
    def table(self) -> float:
        """Parameters of embedding or head on one rank."""
        return self.vocabulary * self.model.hidden / self.plan.tp

    @cached_property
    def logits(self) -> float:
        """Logits of one micro-batch on one rank."""
        return self.rank_tokens * self.vocabulary / self.plan.tp

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a block's matrices, by name."""
        return matrix_shapes(self.model)

    @cached_property
    def launched(self) -> tuple[int, int]:
        """Operations that the host launches for one block, forward and backward; 0 where fused."""
        launches = self.conventions.launches
        return launches.passes(self.plan.lora, len(self.matrices)) if launches else (0, 0)

    @cached_property
    def shared(self) -> ModelShape:
        """The model whose feed-forward layer is what stands beside its experts."""
        return shared_model(self.model)

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """By stage: blocks whose activations a rank holds at once, over all micro-batches."""
        plan, m, v = self.plan, self.micro_batches, self.plan.virtual_stages
        return tuple(
            in_flight_closed(plan.schedule, stage.index, plan.pp, m, v) * stage.layers / v
            for stage in self.stages
        )

    @cached_property
    def activations(self) -> Activations:
        """What a micro-batch leaves in the blocks of each kind of stage."""
        return Activations(self.model, self.plan, self.batch.sequence_length, self.distinct_stages)

    @property
    def gathered_width(self) -> float:
        """Bytes that ZeRO gathers of a parameter of a block: fp8 where the framework keeps it so.

        MXFP8 is gathered in 16 bits: its two copies have other scales, so each rank makes both
        (Megatron-Bridge, `reuse_grad_buf_for_mxfp8_param_ag`).
        """
        in_fp8 = self.plan.precision == "fp8" and kept_in_fp8(self.plan)
        return 1.0 if in_fp8 else self.conventions.gathered_bytes

    @property
    def gathered_held(self) -> float:
        """Bytes that a gathered parameter of a block takes: with its copies in fp8, or these alone."""
        copies = FP8_COPIES[self.plan.precision]
        return copies + self.conventions.gathered_bytes * (not kept_in_fp8(self.plan))

    def varied(self, fields: dict[str, Any]) -> Self:
        """The same context with another `zero_stage` or `offload`, and all that is computed."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, activations=self.activations)
        copy.__dict__["plan"] = changed(self.plan, fields)
        return copy


@dataclass(frozen=True)
class ClusterPlanContext(PlanContext):
    """A context on its machines: what takes seconds.

    Attributes:
        cluster: The machines.
    """

    cluster: Cluster

    def check(self) -> None:
        """Raises ValueError as `PlanContext.check`, or where the plan is not of the cluster's size."""
        super().check()
        check_size(self.plan, self.cluster)

    @property
    def gpu(self) -> Device:
        """The device of every rank."""
        return self.cluster.device


def check_size(plan: Plan, cluster: Cluster) -> None:
    """The plan uses all GPUs of the cluster. Raises ValueError with the dp that does."""
    if plan.ranks == cluster.gpus:
        return
    within = plan.tp * plan.pp * plan.cp
    if within > cluster.gpus:
        advice = "Lower tp, pp or cp"
    elif cluster.gpus % within:
        below, above = nearest_divisors(cluster.gpus, within)
        near = f"{below} or {above}" if above else f"{below}"
        advice = f"Take tp * pp * cp that divides {cluster.gpus}: {near}"
    else:
        advice = f"With the same tp, pp and cp, dp is {cluster.gpus // within}"
    raise ValueError(
        f"The plan is for {plan.ranks} GPUs (dp * tp * pp * cp = {plan.dp} * {plan.tp} * "
        f"{plan.pp} * {plan.cp}), the cluster has {cluster.gpus}. {advice}."
    )
