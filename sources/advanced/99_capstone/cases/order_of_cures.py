"""Case "order_of_cures": a job out of memory; cures in an order, each needed, the cheapest first."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from utils.labs.cases import judge, scored
from utils.labs.kinds import Kind, WrongKind, number, several, text
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner import Batch, Cluster, Estimate, Plan, estimate
from utils.planner.neighbours import largest_category
from utils.units import GIB, format_bytes, format_seconds

from .plans import estimated, fastest, plan_name_of, room
from .sheet import Gains, Sheet

_RUNS = {
    1: ("llama-3.2-1b", "RTX 4090", 2048, 8, "deepspeed"),
    2: ("llama-2-7b", "A100-80GB", 2048, 16, "bf16"),
    3: ("llama-3.2-1b", "L4", 8192, 8, "bf16"),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "micro_batch": (4, 2, 1),
    "loss": ("chunked",),
    "recompute": ("full",),
    "offload": ("optimizer",),
    "optimizer_in_backward": (True,),
}
SLACK = 0.03


@dataclass(frozen=True)
class OutOfMemory:
    """A run that does not fit.

    Attributes:
        model, cluster, plan, batch: For `estimate`.
    """

    model: str
    cluster: Cluster
    plan: Plan
    batch: Batch

    def after(self, *steps: Mapping[str, Any]) -> Estimate:
        """The estimate after some cures, each a dict of one field and its value."""
        changes = {name: value for step in steps for name, value in step.items()}
        return estimate(self.model, self.cluster, replace(self.plan, **changes), self.batch)

    def __str__(self) -> str:
        found = self.after()
        rows = "\n".join(
            f"  {name:<16} {format_bytes(size):>10}"
            for name, size in found.peak.bytes_by_category.items()
            if size > GIB / 10
        )
        return "\n".join(
            [
                f"OutOfMemoryError: {self.model}, {self.batch.sequences} sequences of {self.batch.sequence_length}, on one "
                f"{self.cluster.device.name} of {format_bytes(self.cluster.device.memory_bytes)}.",
                f"At the peak, in phase {found.peak.phase} (predicted):",
                rows,
                "Which category is the largest, how many GiB are missing, and which steps lead out? A step changes one field of",
                f'the plan, as in {{"micro_batch": 1}}. Choose from {_choices()}.',
                "Together they fit with headroom, and are at most 3% slower than the fastest way out. Leave one out, and it no",
                "longer fits with headroom. List first the step that, taken alone, costs the least time.",
            ]
        )


@functools.cache
def data(seed: int) -> OutOfMemory:
    """The run of a seed."""
    model, gpu, length, sequences, framework = _RUNS[seed]
    return OutOfMemory(
        model,
        Cluster(gpu=gpu, nodes=1, gpus_per_node=1, host_memory_bytes=200 * GIB),
        Plan(micro_batch=sequences, framework=framework),
        Batch(sequences=sequences, sequence_length=length),
    )


@functools.cache
def par(seed: int) -> Estimate:
    """The fastest way out."""
    case = data(seed)
    options = [(getattr(case.plan, name), *values) for name, values in CHOICES.items()]
    plans = []
    for values in itertools.product(*options):
        try:
            plans.append(replace(case.plan, **dict(zip(CHOICES, values, strict=True))))
        except ValueError:  # optimizer_in_backward with offload
            continue
    return fastest(case.model, case.cluster, case.batch, plans)


def _choices() -> str:
    """The steps that `par` tries, as a brief names them."""
    return "; ".join(f"{name} {' or '.join(map(str, values))}" for name, values in CHOICES.items())


def _roomy(found: Estimate) -> bool:
    return found.fits and not found.tight


def _verdict(case: OutOfMemory, answer: Mapping[str, Any]) -> Verdict:
    before = case.after()
    name, _ = largest_category(before.peak)
    problem = judge(
        answer["largest category"],
        str(name),
        "the largest category",
        expected="a name in the brief",
        nudge="Profile first: which line of the breakdown is the largest?",
    )
    problem = problem or judge(
        answer["missing GiB"],
        before.missing_bytes / GIB,
        "what is missing",
        within=0.5,
        expected="GiB",
        wrong={before.peak.needed_bytes / GIB: "That is all it needs."},
        nudge="case.after().missing_bytes is in bytes; a GiB is 2**30 of them.",
    )
    return problem or _judge_steps(case, answer["steps"])


def _judge_steps(case: OutOfMemory, steps: tuple[Mapping[str, Any], ...]) -> Verdict:
    plan = case.plan
    for step in steps:
        try:
            plan = replace(plan, **step)
        except (TypeError, ValueError) as sentence:
            return not_yet(f"step {dict(step)!r}: {sentence}")
    end = estimated(case.model, case.cluster, plan, case.batch, "after the last step")
    if isinstance(end, Verdict):
        return end
    if problem := room(
        end,
        "after the last step",
        "Which category is the largest now? A cure for another one moves nothing.",
    ):
        return problem
    if problem := _needless(case, steps) or _dear_first(case, steps):
        return problem
    seed = next(seed for seed in _RUNS if data(seed) == case)
    slower = end.step_seconds / par(seed).step_seconds - 1
    if slower > SLACK:
        return not_yet(
            f"it fits, and is {slower:.0%} slower than the fastest way out",
            got=plan_name_of(end.plan),
            nudge="Recomputation adds about a third to the compute, the host a transfer for every step; a smaller "
            "micro-batch and a chunked loss cost little. Which could replace the dear one?",
        )
    return correct(
        f"{len(steps)} steps, each needed",
        score=scored(end.step_seconds, par(seed).step_seconds, "a step", format_seconds),
    )


def _needless(case: OutOfMemory, steps: tuple[Mapping[str, Any], ...]) -> Verdict | None:
    for left_out in range(len(steps)):
        rest = [step for place, step in enumerate(steps) if place != left_out]
        if _roomy(case.after(*rest)):
            return not_yet(
                "a step is needless",
                got=f"{dict(steps[left_out])!r}",
                nudge="Without it the others fit with headroom. Which one does the work?",
            )
    return None


def _dear_first(case: OutOfMemory, steps: tuple[Mapping[str, Any], ...]) -> Verdict | None:
    """By what each costs alone, in seconds of a step."""
    costs = [case.after(step).step_seconds for step in steps]
    for (one, two), (first, second) in zip(
        itertools.pairwise(costs), itertools.pairwise(steps), strict=True
    ):
        if one > 1.001 * two:
            return not_yet(
                "a dearer cure stands before a cheaper one",
                got=f"{dict(first)!r} before {dict(second)!r}",
                nudge="Alone, which of the two makes the step longer? case.after(step).step_seconds",
            )
    return None


def _gains(case: OutOfMemory, answer: Mapping[str, Any]) -> Gains:
    saved = case.after().peak.needed_bytes - case.after(*answer["steps"]).peak.needed_bytes
    return Gains(bytes_saved=saved)


def _read_step(value: Any) -> dict[str, Any]:
    names = {field.name for field in fields(Plan)} & set(CHOICES)
    if (
        not isinstance(value, Mapping)
        or len(value) != 1
        or not all(isinstance(name, str) and name in names for name in value)
    ):
        raise WrongKind(f"One field a step, of {', '.join(CHOICES)}.")
    ((name, found),) = value.items()
    return {name: number().read(found) if name == "micro_batch" else found}


SHEET = Sheet(
    "Out of memory: in which order?",
    "intermediate",
    "curing an out-of-memory error in order",
    "A job runs out of memory: what do you do, in which order?",
    ("10", "05", "07"),
    {
        "largest category": text(),
        "missing GiB": number("a number of GiB"),
        "steps": several(Kind("a dict of one field", _read_step), what="a list of steps"),
    },
    data,
    _verdict,
    _gains,
)
