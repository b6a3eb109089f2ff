"""Case "unknown_job": a job died of memory, and there is no code, only its record."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.clinic.allocator_replay import smallest_capacity
from utils.clinic.lab_ward import CAUSES, RESERVED, WARD, after_cure, as_it_came
from utils.labs.cases import judge
from utils.labs.kinds import number, one_of
from utils.labs.verdict import Verdict, correct, not_yet
from utils.units import MIB, Category, Evidence

from .sheet import Gains, Sheet

_PATIENTS = {1: 1, 2: 5, 3: 3}  # of lab 10
CATEGORIES = (*map(str, Category), RESERVED)
FIRST = {
    "forgotten reference": "drop what is kept",
    "kept graph": "drop what is kept",
    "missing no_grad": "no_grad around what does not train",
    "fragmentation": "long-lived tensors first",
    "large logits": "a part of the rows at a time",
    "optimizer step": "step in backward",
    "large input": "a kernel that keeps no scores",
}
_TOLD = {
    "forgotten reference": "What is alive after a step grows from step to step. No single moment does that.",
    "missing no_grad": "Nothing grows between steps. Whose activations are they, and do its parameters train?",
    "fragmentation": "What is alive would fit the budget. What does the allocator need beyond it?",
}


@dataclass(frozen=True)
class Record:
    """What the meter wrote of a run.

    Attributes:
        seed: Whose.
        budget_mib, peak_mib: What it may take, and the most that was alive.
        phase: When that was.
        allocator_mib: The smallest GPU on which the caching allocator serves every request.
        alive_mib: After each optimizer step.
        held_mib: By category at the peak.
        trained: Parameters that the optimizer has, as a share of all.
    """

    seed: int
    budget_mib: float
    peak_mib: float
    phase: str
    allocator_mib: float
    alive_mib: tuple[float, ...]
    held_mib: Mapping[str, float]
    trained: float

    def __str__(self) -> str:
        held = ", ".join(f"{name} {mib:.1f}" for name, mib in self.held_mib.items() if mib > 0.2)
        return "\n".join(
            [
                f"A job may take {self.budget_mib:.0f} MiB and dies. You have its record, without a line of code (measured):",
                f"  most alive             {self.peak_mib:.1f} MiB, in {self.phase}",
                f"  the allocator needs    {self.allocator_mib:.1f} MiB",
                f"  at the peak, MiB       {held}",
                f"  alive after each step  {', '.join(f'{mib:.1f}' for mib in self.alive_mib)} MiB",
                f"  parameters that train  {self.trained:.0%} of all",
                "What is the cause, which category fills the memory, how many MiB does it grow by from step to step,",
                "how many does the allocator need beyond what is alive, and what do you do first?",
            ]
        )


@functools.cache
def data(seed: int) -> Record:
    """The record of a seed, from a run under the meter."""
    found = as_it_came(_PATIENTS[seed])
    line = found.run.timeline
    ends = [span.end_ns for span in line.spans if span.name == "optimizer step"]
    model, optimizer = found.patient.build()
    trains = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return Record(
        seed,
        found.patient.limit_bytes / MIB,
        found.run.peak_bytes / MIB,
        str(found.run.peak_phase),
        smallest_capacity(line) / MIB,
        tuple(line.at(ns).total_bytes / MIB for ns in ends),
        {str(name): size / MIB for name, size in dict(found.run.breakdown).items()},
        trains / sum(p.numel() for p in model.parameters()),
    )


def growth_mib(record: Record) -> float:
    """From step to step, over all steps of the record."""
    return (record.alive_mib[-1] - record.alive_mib[0]) / (len(record.alive_mib) - 1)


def _verdict(record: Record, answer: Mapping[str, Any]) -> Verdict:
    known = WARD[_PATIENTS[record.seed]]
    grows, gaps = growth_mib(record), record.allocator_mib - record.peak_mib
    steps = len(record.alive_mib) - 1
    never = {
        "optimizer step": "Adam's moments are in the list: are they what fills it?",
        "large logits": "Logits and loss are in the list: are they what fills it?",
    }
    problem = judge(
        answer["cause"],
        known.cause,
        "the cause",
        expected="another one",
        wrong=never,
        nudge=_TOLD[known.cause],
    )
    if problem is None and answer["category"] not in known.categories:
        problem = not_yet(
            "the category",
            got=answer["category"],
            expected="the one that fills the memory",
            nudge="Which is far larger than a healthy step needs? Reserved and not alive is one, too.",
        )
    problem = (
        problem
        or judge(
            answer["grows MiB a step"],
            grows,
            "the growth",
            within=0.1,
            expected="MiB from step to step",
            wrong={
                grows * steps: "That is the growth of the whole run.",
                grows * steps / (steps + 1): "Between n steps lie n - 1.",
            },
            nudge="What is alive after the last step, less the first, over the steps between.",
        )
        or judge(
            answer["beyond alive MiB"],
            gaps,
            "what the allocator needs beyond it",
            within=0.1,
            expected="MiB",
            wrong={
                record.allocator_mib: "That is all it needs. How much of it is not alive?",
                record.allocator_mib - record.budget_mib: "That is what the budget lacks.",
            },
            nudge="What the allocator needs, less the most that was alive.",
        )
        or judge(
            answer["first"],
            FIRST[known.cause],
            "what to do first",
            expected="the cure of your cause",
            nudge="Cure the cause that you named, not a symptom.",
        )
    )
    return problem or correct(f"{known.cause}, from the record alone")


def _gains(record: Record, answer: Mapping[str, Any]) -> Gains:
    number_ = _PATIENTS[record.seed]
    saved = as_it_came(number_).bytes - after_cure(number_).bytes
    return Gains(bytes_saved=saved, evidence=Evidence.MEASURED)


SHEET = Sheet(
    "A job without its code",
    "intermediate",
    "a diagnosis from a memory record",
    "A job died of memory, and all you have is its record: what was it?",
    ("10",),
    {
        "cause": one_of(*CAUSES, what="a cause"),
        "category": one_of(*CATEGORIES, what="a category of bytes"),
        "grows MiB a step": number("a number of MiB"),
        "beyond alive MiB": number("a number of MiB"),
        "first": one_of(*dict.fromkeys(FIRST.values()), what="a cure"),
    },
    data,
    _verdict,
    _gains,
)
