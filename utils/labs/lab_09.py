"""Checks of lesson and lab 09, "Sharding: ZeRO-1, 2, 3 and FSDP"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from utils.labs import ranks_09 as workers
from utils.labs.checking import starts_ranks
from utils.labs.verdict import Verdict, correct, not_yet
from utils.ranks import RankError, run_ranks

RANKS, PARAMETERS = 4, 272
TIMEOUT_SECONDS = 8.0
_PER_PARAMETER = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
_SENT = {"allreduce": 3, "owners": 2, "zero3": 3}


def stage_2_on_8(answer: Any) -> Verdict:
    """Lesson 09: bytes per parameter of ZeRO-2 on 8 ranks."""
    if not isinstance(answer, (int, float)):
        return not_yet("a number of bytes is wanted", got=repr(answer))
    if abs(answer - 3.75) < 0.01:
        return correct("2 + 14/8: the parameters are now more than half")
    nudges = {
        2: "That is the limit for many ranks. What are 14 bytes over 8?",
        1.75: "That is the part that is sharded. What is still whole?",
        5.5: "That is ZeRO-1: gradients are still whole there.",
    }
    return not_yet(got=answer, nudge=nudges.get(answer, "2P is whole, 14P is shared by N = 8."))


def one_gpu(answer: Any) -> Verdict:
    """Lesson 09: what ZeRO-2 saves on a single GPU."""
    if isinstance(answer, (int, float)) and answer == 0:
        return correct("a part of one is the whole")
    return not_yet("bytes saved per parameter", got=repr(answer), nudge="Put N = 1 into 2 + 14/N.")


def reduced_times(answer: Any) -> Verdict:
    """Lesson 09: how often ZeRO-2 sends gradients with 8 accumulation steps."""
    if answer == 8:
        return correct("after every backward: no rank has room for the others' gradients")
    nudge = "That is ZeRO-1." if answer == 1 else "Count the backwards of one optimizer step."
    return not_yet(got=repr(answer), nudge=nudge)


def staircase(function: Callable[[int, int, int], float]) -> Verdict:
    """Exercise 1: bytes of states per rank."""
    for stage, (whole, shared) in _PER_PARAMETER.items():
        for count, ranks in [(1_000_000, 1), (1_000_000, 8), (1_300_000_000, 64)]:
            found, right = function(count, stage, ranks), count * (whole + shared / ranks)
            if not isinstance(found, (int, float)) or abs(found - right) > 1e-6 * right:
                return not_yet(
                    f"stage {stage}, {count:,} parameters on {ranks} rank(s)",
                    expected=right, got=found, nudge=_stair_nudge(found, count, ranks),
                )  # fmt: skip
    return correct("16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter")


def _stair_nudge(found: Any, count: int, ranks: int) -> str:
    if not isinstance(found, (int, float)):
        return "A number is wanted. Is there a `return`?"
    for stage, (whole, shared) in _PER_PARAMETER.items():
        if abs(found - count * (whole + shared / ranks)) < 1:
            return f"That is stage {stage}. Which states does the stage asked for still keep whole?"
    if found in (16 * count / ranks, 12 * count / ranks):
        return "Not all 16 bytes are sharded at this stage. What stays whole on every rank?"
    return "Optimizer state is 12 bytes, gradients 2, parameters 2; a stage divides some by N."


def sent_bytes(function: Callable[[int, int, str], float]) -> Verdict:
    """Exercise 2: bytes that a rank of a ring sends in a step, for bf16."""
    for how, rounds in _SENT.items():
        for count, ranks in [(1_000_000, 4), (1_000_000, 1), (800, 8)]:
            found, right = function(count, ranks, how), rounds * 2 * count * (ranks - 1) / ranks
            if not isinstance(found, (int, float)) or abs(found - right) > 1e-6 * max(right, 1):
                nudge = _sent_nudge(found, right, count, ranks)
                return not_yet(
                    f"{how!r}, {count:,} parameters on {ranks} rank(s)",
                    expected=right, got=found, nudge=nudge,
                )  # fmt: skip
    return correct("three rounds, two rounds, three rounds")


def _sent_nudge(found: Any, right: float, count: int, ranks: int) -> str:
    if not isinstance(found, (int, float)):
        return "A number is wanted. Is there a `return`?"
    if ranks == 1:
        return "One rank has nobody to send to."
    if abs(2 * found - right) < 1:
        return "That counts elements. One takes two bytes in bf16."
    if abs(found * (ranks - 1) / ranks - right) < 1:
        return "Nearly: a rank does not send its own part. What is the factor (N - 1) / N for?"
    return "Count rounds: an all-reduce is two, an all-gather, a reduce or a reduce-scatter one."


def smallest_stage(function: Callable[[int, int, float], Any]) -> Verdict:
    """Exercise 3: the lowest stage whose states fit."""
    cases = [(1.3e9, 8, 24e9), (1.3e9, 8, 12e9), (1.3e9, 8, 6e9), (1.3e9, 8, 3e9), (1.3e9, 1, 16e9)]
    for count, ranks, card in cases:
        stages = (s for s, (w, x) in _PER_PARAMETER.items() if count * (w + x / ranks) <= card)
        found, right = function(int(count), ranks, card), next(stages, None)
        if found != right:
            what = f"{count / 1e9} billion parameters, {ranks} rank(s), {card / 1e9:.0f} GB"
            nudge = "Try stages from 0 up, and stop at the first that fits: a higher one sends more."
            if right is None:
                nudge = "On one rank no stage saves anything: return None when none fits."
            return not_yet(what, expected=right, got=repr(found), nudge=nudge)
    return correct("the lowest stage that fits, and None where none does")


@starts_ranks
def zero_1(function: Callable[..., Any]) -> Verdict:
    """Exercise 4: ZeRO-1 by hand on four ranks."""
    try:
        found = run_ranks(workers.zero_1, RANKS, function, timeout_seconds=TIMEOUT_SECONDS)
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "Does every rank call the same collectives, with tensors of the same size?"
        return not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)
    return _equal(found) or _lean(found[0]) or correct(
        "equal to one process, on a quarter of the state",
        score=f"{found[0].state_bytes} bytes of state, {sum(found[0].sent.values())} bytes put in",
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


def accumulation(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 5: gradients sent once for every backward, and the cure."""
    what, times, cured = answer.values()
    if str(what).strip().lower() not in ("all-reduce", "allreduce", "all_reduce"):
        nudge = "Which line of the table grew with the accumulation steps?"
        return not_yet("the collective", got=repr(what), nudge=nudge)
    if times != 4:
        nudge = "Divide its bytes by the bytes of all gradients, 2P."
        return not_yet("how many times", got=repr(times), nudge=nudge)
    if not isinstance(cured, Mapping):
        return not_yet("the cure is a configuration, from zero_config(...)", got=repr(cured))
    if cured.get("gradient_accumulation_steps") != 4:
        nudge = "Keep the four micro-batches: with one large one the activations come back."
        return not_yet("the cure changes the accumulation", nudge=nudge)
    stage = cured.get("zero_optimization", {}).get("stage")
    if stage != 1:
        nudge = "Which stage keeps whole gradients on every rank until the step?"
        return not_yet("the stage", got=stage, nudge=nudge)
    return correct("ZeRO-1 adds up whole gradients and sends them once: bytes for memory")


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-4, atol=1e-6)
