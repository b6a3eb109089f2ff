"""Case "seven_billion": adapters, and the full fine-tune, on one card of 24 GB."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.cases import scored
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import Batch, Cluster, Estimate, Lora, Plan, estimate, plan_name
from utils.units import GIB, format_bytes, format_seconds

from .plans import estimated, fastest, plan_kind, plan_name_of, room
from .sheet import Gains, Sheet

_RUNS = {
    1: ("llama-2-7b", "RTX 4090", 1024, 128),
    2: ("mistral-7b", "A10", 2048, 192),
    3: ("qwen2.5-7b", "L4", 2048, 256),
}
SLACK, RANK = 0.05, 16


@dataclass(frozen=True)
class OneCard:
    """A model of seven billion parameters and one card.

    Attributes:
        model: Its name in the catalog.
        cluster: One card, and its host's memory.
        batch: Of one optimizer step.
    """

    model: str
    cluster: Cluster
    batch: Batch

    def __str__(self) -> str:
        bare = estimate(self.model, self.cluster, Plan(framework="deepspeed"), self.batch)
        rows = "\n".join(
            f"  {name:<16} {format_bytes(size):>10}"
            for name, size in bare.peak.bytes_by_category.items()
            if size > GIB / 10
        )
        return "\n".join(
            [
                f"{self.model} on one {self.cluster.device.name} of {format_bytes(self.cluster.device.memory_bytes)}; the host has "
                f"{format_bytes(self.cluster.host_bytes_per_node)}. A step takes {self.batch.sequences} sequences of "
                f"{self.batch.sequence_length} tokens.",
                "A full fine-tune, with nothing done about it (predicted):",
                rows,
                f'Give two plans that fit with headroom. "adapters": LoRA of rank {RANK} or more, its base as you like.',
                '"full": every parameter trains, framework="deepspeed". Each at most 5% slower than the fastest.',
            ]
        )


@functools.cache
def data(seed: int) -> OneCard:
    """The card of a seed."""
    model, gpu, length, host = _RUNS[seed]
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=1, host_memory_bytes=host * GIB)
    return OneCard(model, cluster, Batch(sequences=16, sequence_length=length))


@functools.cache
def par(model: str) -> tuple[Estimate, Estimate]:
    """The fastest plan with adapters, and the fastest that trains all."""
    case = next(data(seed) for seed, run in _RUNS.items() if run[0] == model)
    sizes = list(itertools.product((1, 2, 4, 8, 16), ("none", "full"), ("whole", "chunked")))
    adapters = [
        Plan(micro_batch=b, recompute=r, loss=loss, lora=Lora(rank=RANK, base=base))
        for b, r, loss in sizes
        for base in ("bf16", "int8", "nf4-dq")
    ]
    full = [
        Plan(
            micro_batch=b,
            recompute=r,
            loss=loss,
            offload=where,
            zero_stage=stage,
            framework="deepspeed",
        )
        for b, r, loss in sizes
        for where, stage in (("optimizer", 2), ("parameters", 3))
    ]
    return (
        fastest(case.model, case.cluster, case.batch, adapters),
        fastest(case.model, case.cluster, case.batch, full),
    )


def _verdict(case: OneCard, answer: Mapping[str, Any]) -> Verdict:
    best = par(case.model)
    first = _adapters(case, answer["adapters"], best[0])
    if isinstance(first, Verdict):
        return first
    second = _full(case, answer["full"], best[1])
    if isinstance(second, Verdict):
        return second
    seconds, least = (
        first.step_seconds + second.step_seconds,
        best[0].step_seconds + best[1].step_seconds,
    )
    return correct(
        f"{plan_name_of(first.plan)}",
        score=scored(seconds, least, "for a step of each", format_seconds),
    )


def _adapters(case: OneCard, plan: Plan, best: Estimate) -> Estimate | Verdict:
    if plan.lora is None or plan.lora.rank < RANK:
        return not_yet(
            f"adapters: a plan with lora=Lora(rank={RANK}, ...) is wanted", got=plan_name_of(plan)
        )
    if plan.offload != "none":
        return not_yet(
            "adapters: the optimizer was offloaded",
            got=plan_name_of(plan),
            nudge="How many bytes of state do the adapters have? Look at the category before you move it.",
        )
    found = estimated(case.model, case.cluster, plan, case.batch, "adapters")
    if isinstance(found, Verdict):
        return found
    nudge = "Weights in fewer bits, a smaller micro-batch, recomputation: which category overflows?"
    return room(found, "adapters", nudge) or _slow(found, best, "adapters") or found


def _full(case: OneCard, plan: Plan, best: Estimate) -> Estimate | Verdict:
    if plan.lora is not None or plan.conventions.name != "deepspeed":
        return not_yet(
            'full: every parameter trains, with framework="deepspeed"', got=plan_name_of(plan)
        )
    found = estimated(case.model, case.cluster, plan, case.batch, "full")
    if isinstance(found, Verdict):
        return found
    nudge = "What is left in the largest category, and which offload takes that one to the host?"
    if plan.zero_stage and plan.offload == "none":
        nudge = "ZeRO partitions over data-parallel ranks. Over one rank a part is the whole. What else moves states?"
    return room(found, "full", nudge) or _slow(found, best, "full") or found


def _slow(found: Estimate, best: Estimate, says: str) -> Verdict | None:
    slower = found.step_seconds / best.step_seconds - 1
    if slower <= SLACK:
        return None
    free = found.cluster.device.memory_bytes - found.peak.device_bytes
    return not_yet(
        f"{says} fits, and is {slower:.0%} slower than the fastest plan",
        got=plan_name(found),
        nudge=f"{format_bytes(free)} lie idle. What could you keep, or which batch could pass at once?",
    )


def _gains(case: OneCard, answer: Mapping[str, Any]) -> Gains:
    bare = estimate(case.model, case.cluster, Plan(framework="deepspeed"), case.batch)
    mine = estimate(case.model, case.cluster, answer["adapters"], case.batch)
    return Gains(bytes_saved=bare.peak.needed_bytes - mine.peak.needed_bytes)


SHEET = Sheet(
    "Seven billion on one card",
    "intermediate",
    "fine-tuning within 24 GB, with and without offload",
    "How do you fine-tune 7B on 24 GB, and what does it take to train all of it?",
    ("06", "07"),
    {"adapters": plan_kind(), "full": plan_kind()},
    data,
    _verdict,
    _gains,
)
