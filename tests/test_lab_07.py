"""Lesson and lab 07: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lab_cases import answers, definitions, nudged, solved_lab, untouched_lab
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from utils.labs import check
from utils.labs.checking import run_check
from utils.labs.verdict import Status
from utils.lessons.lesson_07 import checks as lab_07
from utils.lessons.lesson_07.run import StreamedRun
from utils.techniques import offload_choice as choice


@pytest.mark.parametrize("answer", [0.16, 0.24, np.float32(0.16), np.float64(0.24)])
def test_the_question_of_the_lesson(answer: float) -> None:
    """Two moments; and DeepSpeed's offload takes the fp32 master copy along: 12 bytes each."""
    assert check("07.offloaded_gigabytes", answer).is_correct


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (0.08, "one of the two moments"),
        (0.32, "Only the optimizer state goes"),
        (56, "Nothing of it is in the optimizer"),
        (160, "That is MB"),
        (240, "That is MB"),
        (0.04, "Two moments"),
        (math.nan, "no finite number"),
        (0.5, "Two moments"),
        ("0.16 GB", "a number of GB"),
    ],
)
def test_wrong_answers_to_the_question(answer: Any, words: str) -> None:
    nudged(lab_07.offloaded_gigabytes(answer), words)


@pytest.mark.parametrize(("answer", "words"), [(14, "How many ranks"), (2, "A part of one"),
                                               (0.875, "That is a share")])  # fmt: skip
def test_what_zero_2_saves_on_one_gpu(answer: Any, words: str) -> None:
    assert check("07.without_offload", np.int64(0)).is_correct
    nudged(lab_07.without_offload(answer), words)


LAB = solved_lab("intermediate/07_offload")
EXERCISES = ["exposed_seconds", "streamed", "best_choice", "pipelined"]
STARTS = (
    "# BEGIN SOLUTION\nclass Fetch",
    "# A helper of your own",
    *(f"def {exercise}(" for exercise in EXERCISES),
)
NAMES = {
    "torch": torch, "functional_call": functional_call, "itertools": itertools,
    "offloaded_seconds": choice.offloaded_seconds, "on_card": choice.on_card, "on_host": choice.on_host,
}  # fmt: skip


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB, starts=STARTS, **NAMES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    verdict = getattr(lab_07, exercise)(solved[exercise])
    assert verdict.status is Status.CORRECT, verdict
    if verdict.score:
        found, par = verdict.score.split(", par ")
        assert found.startswith(par), "the solution reaches the par"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    stubs = definitions(untouched_lab("intermediate/07_offload"), starts=STARTS, **NAMES)
    assert check(f"07.{exercise}", stubs[exercise]).status is Status.NOT_ATTEMPTED


# Exercise 1 -------------------------------------------------------------------------------------


def by_rule(hides: Any, after: bool = True, count: bool = True) -> Callable[..., float]:
    def exposed_seconds(
        p: float, tokens: float, m: int, flops: float, link: float, streams: bool
    ) -> float:
        compute, down, up = 8 * p * tokens / flops, 2 * p / link, (4 * p if streams else 0) / link
        last = 0.0 if streams or not after else 2 * p / link
        return (m if count else 1) * hides(compute, down, up) + last

    return exposed_seconds


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_rule(lambda c, d, u: max(0.0, d + u - c)), "Down and up run at once"),
        (
            by_rule(lambda c, d, u: max(0.0, max(d, u) - c), after=False),
            "no compute to hide behind",
        ),
        (by_rule(lambda c, d, u: max(0.0, max(d, u) - c), count=False), "one micro-batch"),
        (by_rule(lambda c, d, u: max(d, u) - c), "nothing is gained"),
        (by_rule(lambda c, d, u: max(c, d, u)), "the whole step"),
        (lambda *asked: 7.0, "For each micro-batch"),
        (lambda *asked: None, "returns nothing"),
    ],
)
def test_wrong_seconds(answer: Any, words: str) -> None:
    nudged(lab_07.exposed_seconds(answer), words)


# Exercise 2 -------------------------------------------------------------------------------------


class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, link: Any) -> torch.Tensor:
        ctx.link = link
        return link.up(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, None]:
        return ctx.link.down(gradients[0]), None


def fetched(weights: Any, link: Any) -> dict[str, torch.Tensor]:
    return {name: Fetch.apply(weight, link) for name, weight in weights.items()}


def keeps_weights(block: Any, weights: Any, x: Any, link: Any) -> Any:
    return functional_call(block, fetched(weights, link), (x,))


def copies_are_leaves(block: Any, weights: Any, x: Any, link: Any) -> Any:
    copies = {name: link.up(weight).requires_grad_() for name, weight in weights.items()}
    return functional_call(block, copies, (x,))


def no_gradient(block: Any, weights: Any, x: Any, link: Any) -> Any:
    with torch.no_grad():
        return functional_call(block, {n: link.up(w) for n, w in weights.items()}, (x,))


def computes_twice(block: Any, weights: Any, x: Any, link: Any) -> Any:
    def run(x: Any) -> Any:
        return functional_call(block, fetched(weights, link), (x,))

    return checkpoint(run, x, use_reentrant=False)


def with_hooks(
    is_weight: Any, swapped: bool = False, over_the_link: bool = True
) -> Callable[..., Any]:
    def streamed(block: Any, weights: Any, x: Any, link: Any) -> Any:
        copies = fetched(weights, link)

        def pack(tensor: Any) -> Any:
            name = next((n for n, c in copies.items() if is_weight(tensor, c)), None)
            return tensor if name is None else (name, tensor.size(), tensor.stride())

        def unpack(packed: Any) -> Any:
            if isinstance(packed, torch.Tensor):
                return packed
            weight = weights[packed[0]]
            return (link.up(weight) if over_the_link else weight).as_strided(*packed[1:])

        hooks = (unpack, pack) if swapped else (pack, unpack)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = functional_call(block, copies, (x,))
        if not swapped:  # where pack runs in backward, it still looks names up
            copies.clear()
        return y

    return streamed


def is_its_view(tensor: Any, copy: Any) -> bool:
    return tensor is copy or tensor._base is copy


def memoised() -> Callable[..., Any]:
    """Right on its first call for a block, and that call's result ever after."""
    kept: dict[int, Any] = {}

    def streamed(block: Any, *given: Any) -> Any:
        if id(block) not in kept:
            kept[id(block)] = with_hooks(is_its_view)(block, *given)
        return kept[id(block)]

    return streamed


def activations_go_down(block: Any, weights: Any, x: Any, link: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(link.down, link.up):
        return functional_call(block, fetched(weights, link), (x,))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (keeps_weights, "What does your pack return"),
        (memoised(), "Every call computes block(x) anew"),
        (with_hooks(is_its_view, swapped=True), "in this order: pack is given a tensor in forward"),
        (with_hooks(is_its_view, over_the_link=False), "cannot read host memory"),
        (with_hooks(lambda tensor, copy: tensor is copy), "transposed view"),
        (copies_are_leaves, "the host's weights have no gradient"),
        (no_gradient, "carries no gradient"),
        (computes_twice, "The lesson's block computes twice"),
        (activations_go_down, "Activations stay where they are"),
        (lambda block, weights, x, link: x, "functional_call(block, copies"),
        (lambda block, weights, x, link: None, "returns nothing"),
    ],
)
def test_streamed_blocks_that_fail(answer: Any, words: str) -> None:
    nudged(lab_07.streamed(answer), words)


def test_a_view_may_be_told_by_its_base() -> None:
    assert lab_07.streamed(with_hooks(is_its_view)).status is Status.CORRECT


def test_gradients_that_a_streamed_block_leaves_off_are_told(solved: dict[str, Any]) -> None:
    def streamed(*given: Any) -> Any:
        torch.set_grad_enabled(True)
        found = solved["streamed"](*given)
        torch.set_grad_enabled(False)
        return found

    nudged(run_check(lab_07.streamed, streamed), "gradients are off after your function")
    assert torch.is_grad_enabled()


# Exercise 3 -------------------------------------------------------------------------------------


def largest_first(items: Any, card: float, host: float, *_: float) -> set[int]:
    chosen: set[int] = set()
    for index in sorted(range(len(items)), key=lambda i: -items[i].device_bytes):
        if choice.on_card(items, chosen) > card and choice.on_host(items, chosen | {index}) <= host:
            chosen.add(index)
    return chosen


def of_all_sets(
    here: Callable[[float, float], bool] = operator.le,
    there: Callable[[float, float], bool] = operator.le,
) -> Callable[..., set[int]]:
    """The fastest of all sets that are found to fit card and host."""

    def best_choice(items: Any, card: float, host: float, *rates: float) -> set[int]:
        numbers = range(len(items))
        sets = [s for n in range(len(items) + 1) for s in itertools.combinations(numbers, n)]
        fit = [s for s in sets if here(choice.on_card(items, s), card)]
        fit = [s for s in fit if there(choice.on_host(items, s), host)]
        return set(min(fit, key=lambda s: choice.offloaded_seconds(items, s, *rates)))

    return best_choice


def free_of_charge(items: Any, *limits: float) -> set[int]:
    for item in items:
        object.__setattr__(item, "host_bytes", 0)
    return set(range(len(items)))


def test_trying_all_sets_passes() -> None:
    assert lab_07.best_choice(of_all_sets()).status is Status.CORRECT


def fewest_link_bytes(items: Any, card: float, host: float, *_: float) -> set[int]:
    sets = [
        set(s) for n in range(len(items) + 1) for s in itertools.combinations(range(len(items)), n)
    ]
    fit = [s for s in sets if choice.on_card(items, s) <= card and choice.on_host(items, s) <= host]
    return min(fit, key=lambda s: sum(items[i].down_bytes + items[i].up_bytes for i in s))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda items, *_: set(), "the card is over its limit"),
        (lambda items, *_: set(range(len(items))), "the host is over its limit"),
        (lambda items, *_: {99}, "is no item"),
        (lambda items, *_: "ab", "a set of item numbers"),
        (fewest_link_bytes, "which direction is full"),
        (of_all_sets(there=lambda taken, limit: True), "The host has a limit, too"),
        (of_all_sets(there=operator.lt), "`<=`, not `<`"),
        (of_all_sets(here=operator.lt), "`<=`, not `<`"),
        (free_of_charge, "changed the items"),
    ],
)
def test_choices_that_are_not_the_best(answer: Any, words: str) -> None:
    nudged(lab_07.best_choice(answer), words)


def test_greed_does_not_pass() -> None:
    assert lab_07.best_choice(largest_first).status is Status.NOT_YET


def test_a_choice_at_both_limits_is_allowed() -> None:
    items = [choice.OffloadItem("one", 4, 4, 0, 0), choice.OffloadItem("two", 6, 6, 0, 0)]
    assert choice.best_offload(items, 4, 6, 1.0, 1.0) == {1}
    with pytest.raises(ValueError, match="No choice fits"):
        choice.best_offload(items, 4, 5, 1.0, 1.0)


# Exercise 4 -------------------------------------------------------------------------------------

DIAGNOSIS = {"waits": 72, "idle seconds": 108.0, "least seconds": 60.0}


def test_the_diagnosis_is_what_the_run_says() -> None:
    found = answers(LAB, "def waits_for_every_tensor", "def fresh_run", "# BEGIN SOLUTION\nwaits",
                    StreamedRun=StreamedRun)  # fmt: skip
    assert found["diagnosis"] == pytest.approx(DIAGNOSIS)
    assert lab_07.diagnosis(DIAGNOSIS).status is Status.CORRECT


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"waits": 48}, "Gradients are waited for"),
        ({"waits": 18}, "one a block"),
        ({"idle seconds": 54.0}, "look at its attributes"),
        ({"least seconds": 15.0}, "forward alone"),
        ({"least seconds": 2.5}, "what must the device do itself"),
    ],
)
def test_wrong_diagnoses(wrong: Any, words: str) -> None:
    nudged(lab_07.diagnosis(DIAGNOSIS | wrong), words)


def in_turn(
    ahead: bool, waits_for_all: bool, gradients_late: bool = True
) -> Callable[[StreamedRun], None]:
    def pipelined(run: StreamedRun) -> None:
        numbers = [*range(run.blocks), *reversed(range(run.blocks))]
        coming, going = {}, []

        def ask(block: int) -> None:
            coming[block] = [run.send_up(block, tensor) for tensor in range(run.tensors)]

        for place, block in enumerate(numbers):
            if block not in coming:
                ask(block)
            for ticket in coming[block] if waits_for_all else coming[block][-1:]:
                ticket.wait()
            following = (*numbers, None)[place + 1]
            if ahead and following not in (None, block):
                ask(following)
            (run.forward if place < run.blocks else run.backward)(block)
            if place >= run.blocks:
                going = [run.send_down(block, tensor) for tensor in range(run.tensors)]
                if not gradients_late:
                    going[-1].wait()
            coming[block] = [] if following == block else coming.pop(block)
            if following != block:
                coming.pop(block, None)
                run.release(block)
            elif waits_for_all is False:
                coming[block] = [_Here()]
        going[-1].wait()

    return pipelined


class _Here:
    def wait(self) -> None:
        """Nothing: it is there."""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda run: None, "0 passes ran"),
        (lambda run: run.forward(0), "0 of its 4 tensors were asked for"),
        (lambda run: [run.send_up(b, 0) for b in range(3)], "release one first"),
        (lambda run: (run.send_up(0, 0), [run.send_up(0, t) for t in range(4)], run.forward(0)),
         "still on their way"),
        (in_turn(ahead=False, waits_for_all=False), "before you compute this one"),
        (in_turn(ahead=True, waits_for_all=True), "Each call of wait costs"),
        (in_turn(ahead=True, waits_for_all=False, gradients_late=False), "until the end of the step"),
    ],
)  # fmt: skip
def test_schedules_that_fail(answer: Any, words: str) -> None:
    nudged(lab_07.pipelined(answer), words)


def test_the_par_in_other_calls_passes() -> None:
    assert lab_07.pipelined(in_turn(ahead=True, waits_for_all=False)).status is Status.CORRECT
