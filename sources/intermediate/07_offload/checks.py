"""Checks of lesson and lab 07, "Offload: memory that lies behind a link"."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.kinds import Kind, WrongKind, equal, function, keys, number, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.planner.offload import CHECKPOINTED_FLOPS, SCHEMES

from .offload_choice import OffloadItem, best_offload, offloaded_seconds, on_card, on_host
from .run import RunError, StreamedRun, best_schedule
from .streamed import judge_streamed

without_offload = Question(
    "Lesson 07: what ZeRO-2 saves on one GPU without offload.",
    number("a number of bytes"),
    right=0,
    wrong={
        14: "That is what it divides by the number of ranks. How many ranks are there?",
        14.0 / 16: "That is a share. How many bytes per parameter are gone on one rank?",
    },
    nudge="A part of one is the whole. The first row of the table below counts it.",
    note="it partitions over one rank: nothing. Offload is what helps",
    expected="bytes saved per parameter",
)


def exposed(
    parameters: float, tokens: float, micro_batches: int, flops: float, link: float, streams: bool
) -> float:
    """Exercise 1's right answer: what the link adds to a step's compute."""
    compute = CHECKPOINTED_FLOPS * parameters * tokens / flops
    scheme = SCHEMES["weights, too" if streams else "gradients, too"]
    each = parameters * max(scheme.down_each, scheme.up_each) / link
    return micro_batches * max(0.0, each - compute) + parameters * scheme.up_once / link


def _exposed_case(says: str, tokens: int, micro_batches: int, streams: bool) -> Case:
    asked = (7e9, tokens, micro_batches, 80e12, 25e9, streams)
    right, compute = exposed(*asked), CHECKPOINTED_FLOPS * 7e9 * tokens / 80e12
    down, up = (2 * 7e9 / 25e9, (4 if streams else 0) * 7e9 / 25e9)
    after = 0.0 if streams else 2 * 7e9 / 25e9
    longest = max(down, up)
    wrong = {
        micro_batches * max(0.0, down + up - compute)
        + after: "That lets one direction wait for the other. Down and up run at once.",
        max(0.0, longest - compute)
        + after: "That is one micro-batch. Which transfers come with each?",
        max(
            0.0, micro_batches * (longest - compute)
        ): "Weights that come up after the optimizer's step find no compute to hide behind.",
        micro_batches * (longest - compute)
        + after: "Where compute is longer than the transfer nothing is exposed, and nothing is gained either.",
        micro_batches * max(0.0, longest - compute)
        + after
        + micro_batches * compute: "That is the whole step. What does the link add to its compute?",
    }
    known = {value: text for value, text in wrong.items() if not equal(value, right, relative=1e-6)}
    return Case(asked, right, says, wrong=known)


exposed_seconds = Exercise(
    "Exercise 1: seconds that the link adds to a step.",
    cases=[
        _exposed_case("gradients leave, micro-batches of 500 tokens, 4 of them", 500, 4, False),
        _exposed_case("gradients leave, micro-batches of 4,096 tokens, 4 of them", 4096, 4, False),
        _exposed_case("weights stream, micro-batches of 1,000 tokens, 4 of them", 1000, 4, True),
        _exposed_case("weights stream, micro-batches of 2,048 tokens, 8 of them", 2048, 8, True),
        _exposed_case("weights stream, one micro-batch of 300 tokens", 300, 1, True),
    ],
    returns=number("a number of seconds"),
    relative=1e-4,
    nudge="For each micro-batch: what goes down, what comes up, how long is its compute? Then what is left.",
    note="micro-batches hide what their compute is long enough for; the upload after the step is always seen",
)


@takes(function())
def streamed(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: a streamed block that keeps its activations and forgets its weights."""
    torch.manual_seed(7)
    return judge_streamed(answer)


def _read_items(value: Any) -> set[int]:
    if not isinstance(value, (Set, Sequence)) or isinstance(value, (str, bytes)):
        raise WrongKind("Item numbers in a set or a list.")
    return {whole().read(index) for index in value}


@takes(function())
def best_choice(answer: Callable[..., Collection[int]]) -> Verdict:
    """Exercise 3: what to offload under a card's and a host's limit, against the optimum."""
    items_of, worst, lost = Kind("a set of item numbers", _read_items), 1.0, []
    for problem in problems():
        items, given = problem[0], [replace(item) for item in problem[0]]
        found = items_of.returned(answer(given, *problem[1:]))
        if given != items:
            nudge = "Items are given, and the score is reckoned with them as they were."
            return not_yet("your function changed the items", nudge=nudge)
        if wrong := [index for index in found if not 0 <= index < len(items)]:
            return not_yet(f"{shown(wrong[0])} is no item: there are {len(items)}, from 0")
        if verdict := _over(found, *problem[:3]):
            return verdict
        best = best_offload(*problem)
        least = offloaded_seconds(items, best, *problem[3:])
        over = offloaded_seconds(items, found, *problem[3:]) / least
        worst = max(worst, over)
        is_full = on_card(items, best) == problem[1] or on_host(items, best) == problem[2]
        lost += [is_full] if over > 1.0 + 1e-9 else []
    score = scored(worst, 1.0, "times the optimum's seconds", "{:.3f}".format)
    if worst > 1.0 + 1e-9:
        nudge = (
            "Transfers cost nothing until one direction is longer than compute, and down and up do not "
            "add. Does your rule know which direction is full?"
        )
        if all(lost):
            nudge = "The best choice fills a limit to the byte here, and so it fits: `<=`, not `<`."
        return not_yet(
            "both limits are kept, but not in the fewest seconds",
            expected="1.000",
            got=score,
            nudge=nudge,
        )
    return correct(f"the optimum in all {len(problems())} problems", score=score)


def _over(
    found: set[int], items: Sequence[OffloadItem], card: float, host: float
) -> Verdict | None:
    if (there := on_host(items, found)) > host:
        nudge = "The host has a limit, too: an item's host_bytes may be more than what it frees."
        return not_yet(
            "the host is over its limit",
            expected=f"at most {host / 1e9:.1f} GB",
            got=f"{there / 1e9:.1f} GB with items {sorted(found)}",
            nudge=nudge,
        )
    if (here := on_card(items, found)) > card:
        nudge = "What stays on the card are the items that are *not* in the set."
        return not_yet(
            "the card is over its limit",
            expected=f"at most {card / 1e9:.1f} GB",
            got=f"{here / 1e9:.1f} GB with items {sorted(found)}",
            nudge=nudge,
        )
    return None


Problem = tuple[list[OffloadItem], float, float, float, float]


def problems() -> list[Problem]:
    """Items, card, host, compute seconds and the link's rate: one that defeats greed, drawn ones,
    and three of these where the host's limit decides: twice it forbids the choice that looks at the
    card alone, once that choice fills it to the byte.
    """
    gb, link = 1e9, 10e9
    greedy = [
        OffloadItem("a", 6 * gb, 6 * gb, 6 * gb, 0),
        OffloadItem("b", 5 * gb, 5 * gb, 0, 5 * gb),
        OffloadItem("c", 5 * gb, 5 * gb, 5 * gb, 0),
        OffloadItem("d", 4 * gb, 9 * gb, 0, 0, 0.2),
    ]
    found: list[Problem] = [(greedy, 10 * gb, 14 * gb, 0.3, link)]
    draw = torch.Generator().manual_seed(11)
    for compute in (0.2, 0.6, 1.0, 0.4, 0.8, 0.0):
        rows = torch.randint(1, 10, (9, 5), generator=draw).tolist()
        items = [
            OffloadItem(
                f"item {n}",
                d * gb,
                (d + h // 3) * gb,
                down * gb * (n % 3 != 0),
                up * gb * (n % 3 != 1),
                seconds / 40 * (n % 4 == 0),
            )
            for n, (d, h, down, up, seconds) in enumerate(rows)
        ]
        whole_bytes = on_card(items, ())
        found.append((items, 0.45 * whole_bytes, 0.75 * whole_bytes, compute, link))
    tight = [(found[1], gb), (found[5], gb), (found[2], 0)]
    return [*found, *(_with_less_host(*problem) for problem in tight)]


def _with_less_host(problem: Problem, less: float) -> Problem:
    """The problem on a host that has so much less than the choice that looks at the card alone."""
    items, card, _, compute, link = problem
    taken = on_host(items, best_offload(items, card, math.inf, compute, link))
    return items, card, taken - less, compute, link


DIAGNOSED = (6, (1.0, 1.0, 1.0, 1.0), 2.5, 0.5)


@takes(
    keys(
        {
            "waits": whole("a whole number"),
            "idle seconds": number("a number of seconds"),
            "least seconds": number("a number of seconds"),
        }
    )
)
def diagnosis(answer: dict[str, Any]) -> Verdict:
    """Exercise 4: what the offload that waits for every tensor costs."""
    blocks, tensors, compute, wait = DIAGNOSED
    loads = 2 * blocks * len(tensors)
    waits = loads + blocks * len(tensors)
    idle = (2 + 1) * blocks * (sum(tensors) + wait * len(tensors))
    count = "The run counts them: look at its attributes after the step."
    return (
        judge(
            answer["waits"],
            waits,
            "waits in the step",
            expected="a count",
            nudge=count,
            wrong={
                loads: "Those are the weights. Gradients are waited for as well.",
                waits // len(tensors): "That is one a block. The program waits for every tensor.",
            },
        )
        or judge(
            answer["idle seconds"],
            idle,
            "seconds of the device idle",
            expected="seconds",
            nudge=count,
            relative=0.01,
        )
        or judge(
            answer["least seconds"],
            4 * blocks * compute,
            "seconds that no schedule can save",
            expected="seconds",
            relative=0.01,
            wrong={
                blocks
                * compute: "That is forward alone. Backward computes the block again, and its gradients."
            },
            nudge="However good the schedule: what must the device do itself, in forward and backward?",
        )
        or correct("the link was never busy beside the device: every wait is idle time")
    )


RUNS = (
    DIAGNOSED,
    (5, (0.5, 2.0, 0.5), 1.0, 0.1),
    (4, (1.0, 1.0), 0.2, 0.05),
    (3, (0.2,) * 6, 2.0, 0.3),
)
SLACK = 1.02  # also one that keeps a single block from forward to backward, and fetches the other


@takes(function())
def pipelined(answer: Callable[[StreamedRun], Any]) -> Verdict:
    """Exercise 4: the cure, against a schedule that fetches ahead, waits late, and fetches nothing twice."""
    worst = 0.0
    for settings in RUNS:
        run, par = StreamedRun(*settings), StreamedRun(*settings)
        best_schedule(par)
        try:
            answer(run)
            run.check_end()
        except RunError as error:
            nudge = "Ask, wait, compute, release: each block needs the four in this order, twice."
            return not_yet(f"{error}", nudge=nudge)
        worst = max(worst, run.seconds / par.seconds)
        if run.seconds > SLACK * par.seconds:
            return not_yet(
                "the step takes longer than it must",
                expected=f"{par.seconds:.1f} s",
                got=f"{run.seconds:.1f} s, {run.waits} waits, {run.idle_seconds:.1f} s idle",
                nudge=_slow_nudge(run, par),
            )
    return correct(score=scored(worst, 1.0, "times the par's seconds, at worst", "{:.3f}".format))


def _slow_nudge(run: StreamedRun, par: StreamedRun) -> str:
    if run.waits > 2 * par.waits:
        return "Each call of wait costs. Tensors arrive in order: if the last is there, so are the others."
    if run.waits <= par.waits + 1:  # the par fetches one block less
        return "Does the link work while the device computes? Ask for the next block before you compute this one."
    return "Which waits stand between two passes? Gradients may arrive until the end of the step."
