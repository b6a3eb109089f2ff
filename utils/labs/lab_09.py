"""Checks of lesson and lab 09, "Sharding: ZeRO-1, 2, 3 and FSDP"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from utils.labs import ranks_09 as workers
from utils.labs.cases import Case, Exercise, Question, judge, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import equal, function, instance, keys, number, or_none, text, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.ranks import RankError, run_ranks

RANKS, PARAMETERS = 4, 272
TIMEOUT_SECONDS = 8.0
_PER_PARAMETER = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
_SENT = {"allreduce": 3, "owners": 2, "zero3": 3}


stage_2_on_8 = Question(
    "Lesson 09: bytes per parameter of ZeRO-2 on 8 ranks.",
    number("a number of bytes"), right=3.75, within=0.01,
    wrong={2: "That is the limit for many ranks. What are 14 bytes over 8?",
           1.75: "That is the part that is sharded. What is still whole?",
           5.5: "That is ZeRO-1: gradients are still whole there."},
    nudge="2P is whole, 14P is shared by N = 8.",
    note="2 + 14/8: the parameters are now more than half",
)  # fmt: skip

one_gpu = Question(
    "Lesson 09: what ZeRO-2 saves on a single GPU.",
    number("a number of bytes"), right=0, nudge="Put N = 1 into 2 + 14/N.",
    note="a part of one is the whole", expected="bytes saved per parameter",
)  # fmt: skip

reduced_times = Question(
    "Lesson 09: how often ZeRO-2 sends gradients with 8 accumulation steps.",
    number("a number of times"), right=8, wrong={1: "That is ZeRO-1."},
    nudge="Count the backwards of one optimizer step.",
    note="after every backward: no rank has room for the others' gradients",
)  # fmt: skip


def _states(count: int, stage: int, ranks: int) -> float:
    whole_bytes, shared = _PER_PARAMETER[stage]
    return count * (whole_bytes + shared / ranks)


def _stair(stage: int, count: int, ranks: int) -> Case:
    says = f"stage {stage}, {count:,} parameters on {ranks} rank(s)"
    partly = "Not all 16 bytes are sharded at this stage. What stays whole on every rank?"
    wrong = {12 * count / ranks: partly, 16 * count / ranks: partly}
    for other in _PER_PARAMETER:
        text = f"That is stage {other}. Which states does the stage asked for still keep whole?"
        wrong[_states(count, other, ranks)] = text
    return Case((count, stage, ranks), _states(count, stage, ranks), says, wrong=wrong)


staircase = Exercise(
    "Exercise 1: bytes of states per rank.",
    cases=[_stair(stage, *size) for stage in _PER_PARAMETER
           for size in [(1_000_000, 1), (1_000_000, 8), (1_300_000_000, 64)]],
    returns=number("a number of bytes"), relative=1e-6,
    nudge="Optimizer state is 12 bytes, gradients 2, parameters 2; a stage divides some by N.",
    note="16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter",
)  # fmt: skip


def _sent(how: str, count: int, ranks: int) -> Case:
    whole_rounds = _SENT[how] * 2 * count
    right = whole_rounds * (ranks - 1) / ranks
    nearly = "Nearly: a rank does not send its own part. What is the factor (N - 1) / N for?"
    wrong = {right / 2: "That counts elements. One takes two bytes in bf16.", whole_rounds: nearly}
    alone = "One rank has nobody to send to." if ranks == 1 else ""
    says = f"{how!r}, {count:,} parameters on {ranks} rank(s)"
    return Case((count, ranks, how), right, says, wrong={} if alone else wrong, nudge=alone)


sent_bytes = Exercise(
    "Exercise 2: bytes that a rank of a ring sends in a step, for bf16.",
    cases=[_sent(how, *size) for how in _SENT for size in [(1_000_000, 4), (1_000_000, 1), (800, 8)]],
    returns=number("a number of bytes"), relative=1e-6, within=1e-6,
    nudge="Count rounds: an all-reduce is two, an all-gather, a reduce or a reduce-scatter one.",
    note="three rounds, two rounds, three rounds",
)  # fmt: skip


def _lowest(count: float, ranks: int, card: float, nudge: str = "") -> Case:
    fits = (stage for stage in _PER_PARAMETER if _states(int(count), stage, ranks) <= card)
    says = f"{count / 1e9} billion parameters, {ranks} rank(s), {card / 1e9:g} GB"
    return Case((int(count), ranks, card), next(fits, None), says, nudge=nudge)


_FULL = "These states fill the card to the last byte, and so they fit: `<=`, not `<`."
smallest_stage = Exercise(
    "Exercise 3: the lowest stage whose states fit.",
    cases=[*(_lowest(1.3e9, 8, card) for card in (24e9, 12e9, 6e9, 3e9)),
           _lowest(1.3e9, 1, 16e9, "On one rank no stage saves anything: return None when none fits."),
           *(_lowest(1e9, 8, card, _FULL) for card in (16e9, 5.5e9, 3.75e9, 2e9))],
    returns=or_none(whole("a stage, 0 to 3")),
    nudge="Try stages from 0 up, and stop at the first that fits: a higher one sends more.",
    note="the lowest stage that fits, and None where none does",
)  # fmt: skip


@starts_ranks
@takes(function())
def zero_1(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: ZeRO-1 by hand on four ranks."""
    try:
        found = run_ranks(workers.zero_1, RANKS, answer, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "Does every rank call the same collectives, with tensors of the same size?"
        return not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)
    return (
        _equal(found)
        or _lean(found[0])
        or correct(
            "equal to one process, on a quarter of the state",
            score=f"{found[0].state_bytes} bytes of state, {sum(found[0].sent.values())} bytes put in",
        )
    )


def _equal(found: list[workers.Report]) -> Verdict | None:
    first = found[0]
    for rank, report in enumerate(found[1:], start=1):
        if not torch.equal(report.parameters, first.parameters):
            nudge = "Each rank updated its part alone. Everyone needs all parts: all-gather them."
            return not_yet(f"rank {rank} has other parameters than rank 0", nudge=nudge)
    if _close(first.parameters, first.right):
        return None
    if _close(first.parameters, first.summed):
        nudge = "Divide by the number of ranks: an all-reduce adds up, and you want the mean."
        return not_yet("the gradients are 4 times too large", nudge=nudge)
    nudge = "velocity = 0.9 * velocity + gradient, then parameter -= rate * velocity, in place."
    return not_yet("the parameters are not those of one process", nudge=nudge)


def _lean(report: workers.Report) -> Verdict | None:
    share = 4 * PARAMETERS // RANKS
    if report.elsewhere_bytes >= share:
        nudge = "Keep the velocity in `state`, of this rank's part alone: what is elsewhere takes memory, too."
        got = f"{report.elsewhere_bytes} bytes elsewhere"
        return not_yet("what stays from step to step", expected=f"{share} bytes in `state`",
                       got=got, nudge=nudge)  # fmt: skip
    if report.state_bytes != share:
        nudge = "A rank needs the velocity of its own part only: make it as long as that part."
        if report.state_bytes < share:
            nudge = "Keep the velocity in `state`, from step to step: it is yours to fill."
        return not_yet("the state", expected=f"{share} bytes", got=report.state_bytes, nudge=nudge)
    reduced = sum(report.sent.get(kind, 0) for kind in ("all-reduce", "reduce-scatter", "reduce"))
    if reduced > 4 * PARAMETERS:
        times = reduced / (4 * PARAMETERS)
        nudge = "Once is enough: one all_reduce of the flat gradient, then divide on every rank."
        return not_yet(f"gradients were put in {times:g} times", expected="once", nudge=nudge)
    if report.calls > 2:
        nudge = "Join the tensors into one flat tensor first: each call has a price of its own."
        return not_yet("collectives in a step", expected=2, got=report.calls, nudge=nudge)
    gathered = report.sent.get("all-gather", 0)
    if gathered != share:
        nudge = "Gather the parts that were updated: each rank puts in its own part."
        return not_yet("the all-gather", expected=f"{share} bytes", got=gathered, nudge=nudge)
    return None


@takes(keys({
    "collective that grew": text(),
    "times that gradients are sent": number(),
    "cured configuration": instance(Mapping, "a configuration, from zero_config(...),"),
}))  # fmt: skip
def accumulation(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 5: gradients sent once for every backward, and the cure."""
    if answer["collective that grew"].replace("-", "").replace("_", "") != "allreduce":
        nudge = "Which line of the table grew with the accumulation steps?"
        return not_yet("the collective", got=shown(answer["collective that grew"]), nudge=nudge)
    nudge = "Divide its bytes by the bytes of all gradients, 2P."
    times = answer["times that gradients are sent"]
    verdict = judge(times, 4, "how many times", expected="a whole number", nudge=nudge)
    return (
        verdict
        or _wrong_cure(answer["cured configuration"])
        or correct("whole gradients are added up on every rank and sent once: bytes for memory")
    )


def _wrong_cure(cured: Mapping[str, Any]) -> Verdict | None:
    if not equal(cured.get("gradient_accumulation_steps"), 4):
        nudge = "Keep the four micro-batches: with one large one the activations come back."
        return not_yet("the cure changes the accumulation", nudge=nudge)
    zero, bf16 = (cured.get(part, {}) for part in ("zero_optimization", "bf16"))
    if not (isinstance(zero, Mapping) and isinstance(bf16, Mapping)):
        nudge = 'Write zero_config(...), or a dict in each of "zero_optimization" and "bf16".'
        return not_yet("a configuration that DeepSpeed does not read", nudge=nudge)
    if bf16.get("enabled") is not True:
        nudge = "The run was in bf16. In fp32 gradients are twice the bytes: keep the precision."
        return not_yet("the cure changes the precision", nudge=nudge)
    if not any(equal(zero.get("stage", 0), stage) for stage in (0, 1)):
        nudge = "Which stage keeps whole gradients on every rank until the step?"
        return not_yet("the stage", got=shown(zero.get("stage")), nudge=nudge)
    return None


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-6)
