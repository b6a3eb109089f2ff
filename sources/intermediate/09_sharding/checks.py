"""Checks of lesson and lab 09, "Sharding: ZeRO-1, 2, 3 and FSDP"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import (
    as_number,
    equal,
    function,
    instance,
    keys,
    number,
    or_none,
    several,
    text,
    whole,
)
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.ranks import RankError, run_ranks
from utils.techniques.deepspeed_config import check_config

from . import workers
from .plans import CARDS, PER_PARAMETER, ROUNDS, Rule, likely_mistakes

RANKS, PARAMETERS = 4, 272
TIMEOUT_SECONDS = 20.0  # right answers take a second or two
PAR_SENT_BYTES = 2 * 4 * PARAMETERS * (RANKS - 1) // RANKS  # a reduce-scatter and an all-gather


zero_3_holds = Question(
    "Lesson 09: ZeRO-3's row of `holds`, bytes per parameter on each of four ranks.",
    several(number(), 4, "four numbers of bytes"),
    right=(0.5, 0.5, 1, 2),
    wrong={
        (2, 2, 12, 12): "That is one rank alone. What does each of four ranks hold?",
        (2, 2, 4, 8): "That is one rank alone. What does each of four ranks hold?",
        (2, 0.5, 1, 2): "That is ZeRO-2's row. What does ZeRO-3 share besides?",
        (2, 2, 1, 2): "That is ZeRO-1's row. What does ZeRO-3 share besides?",
        (1, 1, 1, 2): "Parameters and gradients are in bf16 here: two bytes, not four.",
        (1, 1, 0, 2): "That is FSDP2's row, whose parameters are their own master copy.",
        (0.5, 0.5, 1, 1): "There are two moments, each in fp32.",
        (0.5, 0.5, 3, 3): "The 12 bytes are a master copy of 4 and two moments of 4 each.",
    },
    nudge="Write down 2, 2, 4 and 8 bytes. Which of them are shared by four ranks?",
    note="16 bytes over four ranks, and a bucket besides",
)

zero_2_sends = Question(
    "Lesson 09: rounds of ZeRO-2, as it comes, in a step of four micro-batches: reduced, gathered.",
    several(number(), 2, "two numbers of rounds"),
    right=(8, 1),
    wrong={
        (2, 1): "That is a step of one micro-batch. What does ZeRO-2 send after every backward?",
        (4, 1): "So often are gradients reduced. How many rounds is an all-reduce?",
        (8, 4): "Parameters are gathered after the step alone, not in every micro-batch.",
        (8, 8): "Parameters are gathered after the step alone, not in every micro-batch.",
        (1, 8): "Reduced rounds come first, gathered ones second.",
    },
    nudge="Count the backwards of one optimizer step, an all-reduce each, and what follows the step.",
    note="an all-reduce after every backward, and one gather of the parameters",
)


def _states(count: int, stage: int, ranks: int) -> float:
    whole_bytes, shared = PER_PARAMETER[stage]
    return count * (whole_bytes + shared / ranks)


def _moments(count: int, stage: int, ranks: int, bucket: int) -> tuple[float, float]:
    """Bytes at the end of backward, and when the optimizer begins."""
    parameters = 2 * count / (ranks if stage == 3 else 1)
    rest = parameters + 12 * count / ranks
    gradients = 2 * count if stage == 1 else 2 * count / ranks + 2 * bucket
    lasting = 2 * bucket if stage == 3 else 0
    return rest + gradients, rest + 6 * count / ranks + lasting


def _largest(stage: int, count: int, ranks: int, bucket: int) -> Case:
    backward, begins = _moments(count, stage, ranks, bucket)
    says = f"stage {stage}, {count:,} parameters on {ranks} rank(s), a bucket of {bucket:,}"
    lasting = 2 * bucket if stage == 3 else 0
    mistakes = [
        (
            _states(count, stage, ranks),
            "That is the textbook's. It leaves out the fp32 copy of the gradients, and the bucket.",
        ),
        (min(backward, begins), "That is the other moment. Compute both, and return the larger."),
        (backward + begins, "The two moments are not at once: take the larger, not the sum."),
        (
            begins - 4 * count / ranks,
            "When the optimizer begins, an fp32 copy of this rank's gradients is there as well.",
        ),
        (
            begins - 2 * count / ranks,
            "The fp32 copy stands beside the 16-bit gradients: 4 + 2 bytes of each.",
        ),
        (begins - lasting, "Stage 3 keeps its bucket for good, also at the step."),
    ]
    wrong = dict(reversed(mistakes))  # of equal values the first's text
    right = max(backward, begins)
    return Case(
        (count, stage, ranks, bucket), right, says, {k: v for k, v in wrong.items() if k != right}
    )


largest_moment = Exercise(
    "Exercise 1: bytes of states on a rank, at the moment when there are most.",
    cases=[
        _largest(stage, *size)
        for stage in (1, 2, 3)
        for size in [
            (1_000_000, 2, 250_000),
            (1_000_000, 8, 250_000),
            (1_300_000_000, 64, 500_000_000),
        ]
    ],
    returns=number("a number of bytes"),
    relative=1e-6,
    nudge="Write down both moments: parameters, gradients in 16 bits, in 32, the bucket, 12 bytes of optimizer state.",
    note="with few ranks the step decides for ZeRO-1, with many its backward",
)


def _rounds(how: str, accumulation: int) -> int:
    g = accumulation
    return {"zero1": 2 + 1, "zero2": 2 * g + 1, "zero2 to owners": g + 1, "zero3": 3 * g}[how]


def _sent(how: str, count: int, ranks: int, accumulation: int) -> Case:
    rounds = _rounds(how, accumulation)
    once = 2 * count * (ranks - 1) / ranks
    right = rounds * once
    wrong = {
        right / 2: "That counts elements. One takes two bytes in bf16.",
        rounds
        * 2
        * count: "Nearly: a rank does not send its own part. What is the factor (N - 1) / N for?",
        _rounds(how, 1) * once: "That is one micro-batch. What is sent again in each of them?",
        accumulation
        * _rounds(how, 1)
        * once: "Not everything is sent in each micro-batch: when are parameters "
        "gathered, and when does this stage send gradients?",
    }
    alone = "One rank has nobody to send to." if ranks == 1 else ""
    says = f"{how!r}, {count:,} parameters on {ranks} rank(s), {accumulation} micro-batches"
    wrong = {} if alone else {value: text for value, text in wrong.items() if value != right}
    return Case((count, ranks, how, accumulation), right, says, wrong=wrong, nudge=alone)


sent_bytes = Exercise(
    "Exercise 2: bytes that a rank of a ring sends in a step of several micro-batches, for bf16.",
    cases=[
        _sent(how, *size, g)
        for how in ("zero1", "zero2", "zero2 to owners", "zero3")
        for size, g in [
            ((1_000_000, 4), 1),
            ((1_000_000, 4), 8),
            ((1_000_000, 1), 2),
            ((800, 8), 3),
        ]
    ],
    returns=number("a number of bytes"),
    relative=1e-6,
    within=1e-6,
    nudge="Count rounds: an all-reduce is two, an all-gather, a reduce or a reduce-scatter one.",
    note="3, 2g + 1, g + 1 and 3g rounds",
)


@takes(function())
def cheapest_plan(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the stage and micro-batch that fit and send least, against the optimum."""
    kind = or_none(several(whole(), 2, "a stage and a micro-batch"))
    choices = [kind.returned(answer(*card)) for card in CARDS]
    hint = " Or: ".join(likely_mistakes(choices)[:2])
    spent, best, lost = 0, 0, []
    for card, found in zip(CARDS, choices, strict=True):
        plans = Rule().plans(card)
        if problem := _plan_problem(found, plans, card):
            return not_yet(
                _card_in_words(*card), got=f"{shown(found)}. {problem}", nudge=hint or problem
            )
        least = min(plans.values(), default=0)
        spent, best = spent + (plans[found] if found else 0), best + least
        lost += [card] if found and plans[found] > least else []
    score = scored(spent, best, "rounds sent")
    if lost:
        got = f"{score}; the first that sends too much: {_card_in_words(*lost[0])}"
        nudge = (
            "A higher stage leaves room for a larger micro-batch, and fewer of those send less: try all "
            "pairs of a stage and a divisor."
        )
        return not_yet(
            "every plan fits, but not at the least traffic", got=got, nudge=hint or nudge
        )
    return correct(f"the least traffic on all {len(CARDS)} cards", score=score)


def _card_in_words(count: int, ranks: int, card: int, texts: int, each: int) -> str:
    return (
        f"{count / 1e9:g} billion parameters, {ranks} rank(s), a card of {card / 1e9:g} GB, "
        f"{texts} texts of {each / 1e9:g} GB"
    )


def _plan_problem(
    found: tuple[int, int] | None, plans: Mapping[tuple[int, int], int], given: tuple[int, ...]
) -> str:
    """Why a plan cannot be taken; empty if it can."""
    count, ranks, _, texts, each = given
    if found is None:
        return (
            "Something fits here: did you try stage 3 with one text at a time, and `<=`?"
            if plans
            else ""
        )
    stage, micro = found
    if not plans:
        return "Nothing fits here, also not stage 3 with one text: return None."
    if stage not in ROUNDS or micro < 1 or texts % micro:
        return "A stage is 0 to 3, and the micro-batch divides the texts of the step."
    if found not in plans:
        wanted = _states(count, stage, ranks) + micro * each
        return f"That takes {wanted / 1e9:.2f} GB: states of the stage, and activations of {micro} text(s) at once."
    return ""


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
            score=scored(_ring_bytes(found[0].sent), PAR_SENT_BYTES, "bytes sent")
            + f", with {found[0].state_bytes} bytes of state",
        )
    )


def _ring_bytes(put_in: Mapping[str, int]) -> int:
    """What one rank of a ring sends, of what it put into each collective."""
    factor = {"all-reduce": 2 * (RANKS - 1) / RANKS, "all-gather": RANKS - 1}
    return round(sum(factor.get(kind, (RANKS - 1) / RANKS) * size for kind, size in put_in.items()))


def _equal(found: list[workers.Zero1Report]) -> Verdict | None:
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


def _lean(report: workers.Zero1Report) -> Verdict | None:
    share = 4 * PARAMETERS // RANKS
    if report.elsewhere_bytes >= share:
        nudge = "Keep the velocity in `state`, of this rank's part alone: what is elsewhere takes memory, too."
        got = f"{report.elsewhere_bytes} bytes elsewhere"
        return not_yet(
            "what stays from step to step",
            expected=f"{share} bytes in `state`",
            got=got,
            nudge=nudge,
        )
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


@takes(
    keys(
        {
            "collective that grew": text(),
            "times that gradients are sent": number(),
            "cured configuration": instance(Mapping, "a configuration, from zero_config(...),"),
        }
    )
)
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
    return _wrong_batch(cured) or _wrong_zero(cured)


def _wrong_batch(cured: Mapping[str, Any]) -> Verdict | None:
    if not equal(cured.get("gradient_accumulation_steps"), 4):
        nudge = "Keep the four micro-batches: with one large one the activations come back."
        return not_yet("the cure changes the accumulation", nudge=nudge)
    micro = cured.get("train_micro_batch_size_per_gpu", cured.get("train_batch_size", 16) / 16)
    if not equal(micro, 1):
        nudge = "The slow run's micro-batch was 1. A larger one brings back the activations of before the cut."
        return not_yet("the cure changes the micro-batch", got=shown(micro), nudge=nudge)
    return None


def _wrong_zero(cured: Mapping[str, Any]) -> Verdict | None:
    zero, bf16 = (cured.get(part, {}) for part in ("zero_optimization", "bf16"))
    if not (isinstance(zero, Mapping) and isinstance(bf16, Mapping)):
        nudge = 'Write zero_config(...), or a dict in each of "zero_optimization" and "bf16".'
        return not_yet("a configuration that DeepSpeed does not read", nudge=nudge)
    if bf16.get("enabled") is not True:
        nudge = "The run was in bf16. In fp32 gradients are twice the bytes: keep the precision."
        return not_yet("the cure changes the precision", nudge=nudge)
    if equal(zero.get("stage", 0), 0):
        nudge = "That sends once, and every rank holds the whole optimizer state again. Which stage shares it?"
        return not_yet("the stage", got="0", nudge=nudge)
    if not equal(zero["stage"], 1):
        nudge = "Which stage keeps whole gradients on every rank until the step?"
        return not_yet("the stage", got=shown(zero["stage"]), nudge=nudge)
    if "fp32" in (name := str(cured.get("communication_data_type", ""))):
        nudge = "Gradients were sent in bf16. In fp32 once is as many bytes as twice in bf16."
        return not_yet("the cure sends gradients in another type", got=name, nudge=nudge)
    try:
        check_config(_plain(cured), RANKS)
    except ValueError as error:
        return not_yet("a configuration that DeepSpeed does not take", nudge=str(error))
    return None


def _plain(value: Any) -> Any:
    """The same with Python's numbers in place of numpy's: DeepSpeed reads those alone."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    found = as_number(value)
    return value if found is None else found


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-6)
