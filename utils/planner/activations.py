"""Bytes of activations: what blocks keep from forward to backward, and what is alive inside one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from utils.catalog import ModelShape
from utils.planner.experts import expert_tp
from utils.planner.layout import Plan, changed
from utils.planner.saved_tensors import Saved, on_rank, saved_tensors
from utils.planner.stages import Kind, Stage

# What a token's tensors do not depend on: with it left out, thousands of plans are one.
NEUTRAL = {
    **dict.fromkeys(("dp", "pp", "cp", "ep", "virtual_stages", "micro_batch"), 1),
    **dict.fromkeys(("shard_ranks", "recompute_layers")),
    "zero_stage": 0,
    "recompute": "none",
    "offload": "none",
    "partition": "even",
    "schedule": "1f1b",
}


@dataclass(frozen=True)
class Activations:
    """What one micro-batch leaves in the blocks of each kind of stage, in bytes on one rank.

    Attributes:
        model, plan: What is laid out, and how.
        sequence_length: Tokens in a sequence, before context parallelism splits it.
        distinct_stages: A stage of each kind.
    """

    model: ModelShape
    plan: Plan
    sequence_length: int
    distinct_stages: tuple[Stage, ...]

    @cached_property
    def kept(self) -> dict[Kind, float]:
        """What an average block keeps: some may have experts, some recompute."""
        return {stage.kind: self._kept(stage) for stage in self.distinct_stages}

    @cached_property
    def working(self) -> dict[Kind, float]:
        """What the backward pass of its largest block has beside what is kept."""
        return {stage.kind: self._working(stage) for stage in self.distinct_stages}

    @cached_property
    def block_input(self) -> float:
        """The input of one block."""
        return self._block("full")

    def _block(self, recompute: str, experts: bool = False) -> float:
        return block_bytes(self.model, self.plan, self.sequence_length, recompute, experts)

    def _kept(self, stage: Stage) -> float:
        how, some = self.plan.recompute, self.plan.recompute_layers
        if not stage.layers:
            return self._block(how)
        again = 1.0 if some is None or how != "full" else min(1.0, some / stage.layers)
        average = self._average(stage, how)
        return again * average + ((1 - again) * self._average(stage, "none") if again < 1 else 0.0)

    def _average(self, stage: Stage, recompute: str) -> float:
        kinds = {False: stage.layers - stage.expert_layers, True: stage.expert_layers}
        sizes = (n * self._block(recompute, experts) for experts, n in kinds.items() if n)
        return sum(sizes) / stage.layers

    def _working(self, stage: Stage) -> float:
        return max(
            self._gradients(experts)
            + self._block("none", experts)
            - self._block(self.plan.recompute, experts)  # backward makes the rest again
            for experts in {stage.expert_layers == stage.layers > 0, stage.expert_layers > 0}
        )

    def _gradients(self, experts: bool) -> float:
        """Gradients alive at once inside one block's backward pass.

        The gradient of the residual stream, with sequence parallelism also a gathered input; and the
        widest inner step: GELU's two sides, SwiGLU's three, five where it is unfused (silu(gate),
        up, gate, and both joined), or the scores and their gradient.
        """
        model, plan, s = self.model, self.plan, self.sequence_length
        tokens, width = plan.micro_batch * s / plan.cp, plan.conventions.residual_bytes
        sides = 2 if model.family == "gpt" else 3 if plan.conventions.fused_gate else 5
        inner = width * model.feedforward * sides / plan.tp
        if experts:
            rows = (model.experts_per_token or 0) * expert_tp(plan) / plan.tp
            routed = width * model.expert_width * sides / expert_tp(plan) + 2 * width * model.hidden
            inner = max(rows * routed, width * model.shared_feedforward * sides / plan.tp)
        if plan.attention == "unfused":
            inner = max(inner, 2 * width * model.heads * s / plan.tp)
        return tokens * (width * model.hidden * (1 + plan.sequence_parallel) + inner)


def block_bytes(
    model: ModelShape, plan: Plan, sequence_length: int, recompute: str, experts: bool = False
) -> float:
    """What one block keeps of one micro-batch on one rank, in bytes.

    Args:
        model: The model.
        plan: The layout.
        sequence_length: Tokens in a sequence, before context parallelism splits it.
        recompute: "none", "selective" or "full"; often the plan's own.
        experts: The block is one that has experts.
    """
    tokens = plan.micro_batch * sequence_length / plan.cp
    if recompute == "full":
        stream = Saved("block input", plan.conventions.residual_bytes * model.hidden, "sequence")
        return tokens * on_rank(stream, plan)
    drops = recompute == "selective"
    return tokens * _per_token(model, changed(plan, NEUTRAL), sequence_length, drops, experts)


@lru_cache(maxsize=10_000)
def _per_token(model: ModelShape, plan: Plan, s: int, drops_scores: bool, experts: bool) -> float:
    tensors = saved_tensors(model, plan, s, experts)
    return sum(on_rank(tensor, plan) for tensor in tensors if not (tensor.scores and drops_scores))
