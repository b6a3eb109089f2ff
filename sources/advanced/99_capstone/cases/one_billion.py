"""Case "one_billion": a small model that is said not to fit; what would have to be true."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.catalog import model_shape
from utils.labs.cases import judge, scored
from utils.labs.kinds import number, one_of, whole
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import Batch, Cluster, Estimate, Plan, axis_bytes, estimate, plan_name
from utils.units import GB, Category, format_seconds

from .plans import estimated, fastest, plan_kind, room
from .sheet import Gains, Sheet

_RUNS = {
    1: ("llama-3.2-1b", 8192, 256),
    2: ("tinyllama-1.1b", 4096, 512),
    3: ("opt-1.3b", 2048, 1024),
}
STATE_BYTES, SLACK = 16, 0.05
GROWS = ("parameters", "gradients", "optimizer state", "activations", "logits and loss")


@dataclass(frozen=True)
class SmallModel:
    """A model of a billion parameters on 8 nodes of 8 A100-80GB.

    Attributes:
        model: Its name in the catalog.
        cluster: All 64 cards.
        batch: The global batch.
    """

    model: str
    cluster: Cluster
    batch: Batch

    def on_one_card(self, sequences: int) -> Estimate:
        """One card with everything on it, and so many sequences at once; FSDP's books."""
        return estimate(
            self.model,
            Cluster(gpu=self.cluster.gpu, nodes=1, gpus_per_node=1),
            Plan(framework="fsdp", micro_batch=sequences),
            Batch(sequences=sequences, sequence_length=self.batch.sequence_length),
        )

    def __str__(self) -> str:
        count = model_shape(self.model).parameter_count
        return "\n".join(
            [
                f'"{self.model} has {count / 1e9:.2f}B parameters and does not fit an A100-80GB: we need TP 8." There are',
                f"8 nodes of 8. A step takes {self.batch.sequences} sequences of {self.batch.sequence_length} tokens.",
                "How many GB are its states (16 bytes a parameter)? How many sequences at once fit one card with headroom",
                "(case.on_one_card(n), predicted), and which category is the largest at twice as many? Then give a Plan",
                'for the 64 cards, framework="fsdp", with headroom and at most 5% slower than the fastest.',
            ]
        )


@functools.cache
def data(seed: int) -> SmallModel:
    """The model of a seed."""
    model, length, sequences = _RUNS[seed]
    return SmallModel(
        model, Cluster(gpu="A100-80GB", nodes=8), Batch(sequences=sequences, sequence_length=length)
    )


def most_sequences(case: SmallModel) -> int:
    """The largest number of sequences that one card takes with headroom."""
    count = 0
    while (row := case.on_one_card(count + 1)).fits and not row.tight:
        count += 1
    return count


def growing(case: SmallModel) -> str:
    """The largest category at twice as many sequences."""
    held = case.on_one_card(2 * most_sequences(case)).peak.bytes_by_category
    return max(GROWS, key=lambda name: held.get(Category(name), 0.0))


@functools.cache
def par(model: str) -> Estimate:
    """The fastest plan without tensor or pipeline parallelism."""
    case = next(data(seed) for seed, run in _RUNS.items() if run[0] == model)
    choices = itertools.product((0, 1, 2, 3), (None, 8), (1, 2, 4, 8), ("whole", "chunked"))
    plans = [
        Plan(dp=64, zero_stage=z, shard_ranks=group, micro_batch=b, loss=loss, framework="fsdp")
        for z, group, b, loss in choices
    ]
    return fastest(case.model, case.cluster, case.batch, plans)


def _verdict(case: SmallModel, answer: Mapping[str, Any]) -> Verdict:
    count = model_shape(case.model).parameter_count
    most, name = most_sequences(case), growing(case)
    problem = (
        judge(
            answer["states GB"],
            STATE_BYTES * count / GB,
            "the states",
            relative=0.02,
            expected="GB",
            wrong={
                18
                * count
                / GB: "16 bytes here: FSDP's fp32 shards are master and parameter in one.",
                2
                * count
                / GB: "Those are the weights in bf16 alone. Gradients and Adam's moments come on top.",
                4
                * count
                / GB: "Those are the weights alone. Gradients and Adam's moments come on top.",
            },
            nudge="16 bytes, times parameters.",
        )
        or judge(
            answer["sequences at once"],
            most,
            "the sequences",
            expected="a whole number",
            wrong={most + 1: "That one fits without headroom, or not at all: look at .tight."},
            nudge="Count up with case.on_one_card(n) while it fits and is not tight.",
        )
        or judge(
            answer["what overflows"],
            name,
            "what overflows",
            expected="a category that knows the batch",
            nudge="case.on_one_card(n).peak.bytes_by_category, at twice as many sequences as fit.",
        )
    )
    return problem or _plan(case, answer["plan"])


def _plan(case: SmallModel, plan: Plan) -> Verdict:
    if plan.conventions.name != "fsdp" or plan.lora is not None:
        return not_yet('all parameters train, with framework="fsdp"')
    found = estimated(case.model, case.cluster, plan, case.batch, "the plan")
    if isinstance(found, Verdict):
        return found
    if problem := room(
        found, "the plan", "Which of micro-batch and loss makes what overflows smaller?"
    ):
        return problem
    best = par(case.model)
    slower = found.step_seconds / best.step_seconds - 1
    if slower > SLACK:
        nudge = (
            "Tensor parallelism talks in every block. The states fit one card: what does TP buy here?"
            if plan.tp > 1
            else "Recomputation costs a third of the compute, and there is room."
            if plan.recompute == "full"
            else "What crosses the network in every micro-batch, and how many micro-batches are there?"
        )
        return not_yet(
            f"it fits, and is {slower:.0%} slower than the fastest",
            got=plan_name(found),
            nudge=nudge,
        )
    return correct(
        plan_name(found),
        score=scored(found.step_seconds, best.step_seconds, "a step", format_seconds),
    )


def _gains(case: SmallModel, answer: Mapping[str, Any]) -> Gains:
    plan = answer["plan"]
    alone = case.on_one_card(2 * most_sequences(case)).peak.needed_bytes
    mine = estimate(case.model, case.cluster, plan, case.batch).peak.needed_bytes
    return Gains(
        bytes_saved=alone - mine,
        bytes_sent=sum(axis_bytes(case.model, plan, case.batch)[0].values()),
    )


SHEET = Sheet(
    "One billion that does not fit",
    "advanced",
    "FSDP and HSDP over 64 GPUs, and a premise checked",
    "1B over 8 nodes of 8 is said not to fit an A100: is it so, and how do you lay it out?",
    ("09", "14"),
    {
        "states GB": number("a number of GB"),
        "sequences at once": whole("a number of sequences"),
        "what overflows": one_of(*GROWS, what="a category"),
        "plan": plan_kind(),
    },
    data,
    _verdict,
    _gains,
)
