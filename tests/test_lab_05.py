"""The checks of lab 05: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_cases import definitions, nudged, solved_lab, untouched_lab
from torch import nn
from torch.utils.checkpoint import checkpoint

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_05 import checks as lab_05
from utils.techniques import activation_peak, recompute_flops

LAB = solved_lab("intermediate/05_checkpointing")
EXERCISES = ["checkpointed", "predicted_bytes", "best_set", "chunked_loss", "cured_checkpoint"]
STARTS = tuple(f"def {exercise}(" for exercise in EXERCISES)
NAMES = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "contextlib": contextlib}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB, starts=STARTS, **NAMES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    verdict = getattr(lab_05, exercise)(solved[exercise])
    assert verdict.status is Status.CORRECT, verdict
    if verdict.score:
        found, par = verdict.score.split(", par ")
        assert found.startswith(par), "the solution reaches the par"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    stubs = definitions(untouched_lab("intermediate/05_checkpointing"), starts=STARTS, **NAMES)
    assert check(f"05.{exercise}", stubs[exercise]).status is Status.NOT_ATTEMPTED


def diagnosis(what: Any, updates: Any) -> dict[str, Any]:
    return {"what differs": what, "updates per step": updates}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("last_block", "no"),
        ("last_block", " No"),
        ("tiny_layers", 16),
        ("tiny_layers", np.int64(16)),
        ("best_segment", 2),
        ("best_segment", np.float32(2)),
        ("diagnosis", diagnosis("buffers", 2)),
        ("diagnosis", diagnosis("Buffers", np.int64(2))),
        ("diagnosis", dict(reversed(diagnosis("buffers", 2).items()))),
    ],
)
def test_the_questions_accept_the_right_answers(question: str, answer: Any) -> None:
    assert check(f"05.{question}", answer).is_correct


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("last_block", "yes", "backward begins with it"),
        ("last_block", 3, '"yes" or "no"'),
        ("last_block", "maybe", '"yes" or "no"'),
        ("tiny_layers", 8, "plain training"),
        ("tiny_layers", 24, "Each checkpoint keeps its input"),
        ("best_segment", 6, "square root of 36"),
        ("best_segment", 1, "Tensors alive"),
        ("diagnosis", diagnosis("parameters", 2), "parameters() and buffers()"),
        ("diagnosis", diagnosis("gradients", 2), "parameters() and buffers()"),
        ("diagnosis", diagnosis("buffers", 1), "num_batches_tracked"),
        ("diagnosis", diagnosis("buffers", math.nan), "no finite number"),
    ],
)
def test_wrong_answers_to_questions_are_nudged(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_05, question)(answer), words)


# Exercise 1 -------------------------------------------------------------------------------------


def by_hooks(
    replay: bool = True, fork: bool = True, grad: bool = True, once: bool = True
) -> Callable[..., torch.Tensor]:
    def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        state, numbers, again = torch.get_rng_state(), itertools.count(), []

        def unpack(number: int) -> torch.Tensor:
            guard = torch.random.fork_rng() if fork else contextlib.nullcontext()
            if not (once and again):
                again.clear()
                with guard, torch.set_grad_enabled(grad):
                    if replay:
                        torch.set_rng_state(state)
                    with torch.autograd.graph.saved_tensors_hooks(
                        lambda t: again.append(t.detach()), lambda t: t
                    ):
                        block(x)
            return again[number]

        with torch.autograd.graph.saved_tensors_hooks(lambda t: next(numbers), unpack):
            return block(x)

    return checkpointed


def keeps_all(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
        return block(x)


def borrowed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def borrowed_by_its_long_name(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def memoised() -> Callable[..., torch.Tensor]:
    """Right on its first call for a block, and that call's result ever after."""
    kept: dict[int, torch.Tensor] = {}

    def checkpointed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if id(block) not in kept:
            kept[id(block)] = by_hooks()(block, x)
        return kept[id(block)]

    return checkpointed


def in_numpy(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Keeps every activation where no meter of tensors sees it."""
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(), torch.from_numpy
    ):
        return block(x)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (memoised(), "Every call computes block(x) anew"),
        (in_numpy, "its activations were kept somewhere"),
        (borrowed, "it calls torch.utils.checkpoint"),
        (borrowed_by_its_long_name, "it calls torch.utils.checkpoint"),
        (by_hooks(replay=False), "Dropout drew another mask"),
        (by_hooks(fork=False), "moved the random state"),
        (by_hooks(grad=False), "ran again without gradients"),
        (by_hooks(once=False), "for each tensor that was saved"),
        (lambda block, x: None, "returns nothing"),
        (lambda block, x: x, "no gradients"),
        (keeps_all, "still keeps activations"),
        (lambda block, x: block(x) * 2, "the block's own"),
    ],
)
def test_checkpoints_by_hand_that_fail(answer: Any, words: str) -> None:
    nudged(lab_05.checkpointed(answer), words)


def test_the_borrowed_name_is_given_back() -> None:
    lab_05.checkpointed(borrowed)
    assert checkpoint is torch.utils.checkpoint.checkpoint
    assert checkpoint.__module__.startswith("torch.utils")


@pytest.mark.parametrize("kind", [list, tuple, frozenset])
def test_a_set_may_be_another_collection(solved: dict[str, Any], kind: type) -> None:
    verdict = lab_05.best_set(lambda costs, limit: kind(solved["best_set"](costs, limit)))
    assert verdict.status is Status.CORRECT


def test_the_cure_takes_norms_without_statistics(solved: dict[str, Any]) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    solved["cured_checkpoint"](block, torch.randn(8, 4)).sum().backward()
    assert block[0].weight.grad is not None


# Exercise 2 -------------------------------------------------------------------------------------


def plan(edges: Callable[..., int], insides: Callable[..., int]) -> Callable[..., int]:
    def predicted_bytes(layers: int, edge: int, inside: int, every: int) -> int:
        chosen = len(range(0, layers, every)) if every else 0
        return edges(layers, chosen) * edge + insides(layers, chosen, every) * inside

    return predicted_bytes


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (plan(lambda n, c: n, lambda n, c, k: n - c), "being recomputed"),
        (plan(lambda n, c: n, lambda n, c, k: n - c + 1), "One inside too many"),
        (
            plan(lambda n, c: n, lambda n, c, k: max(n - c, 1)),
            "the last block is a checkpointed one",
        ),
        (lambda *asked: math.nan, "a whole number of bytes"),
        (lambda *asked: "many", "a whole number of bytes"),
        (lambda layers, edge, inside, every: None, "returns nothing"),
        (
            lambda n, edge, inside, k: lab_predicted(n, edge, inside, k) - edge * (k == 1),
            "Every block's input stays",
        ),
        (lambda n, edge, inside, k: 7, "Walk backward"),
    ],
)
def test_wrong_predictions(answer: Any, words: str) -> None:
    nudged(lab_05.predicted_bytes(answer), words)


def lab_predicted(layers: int, edge: int, inside: int, every: int) -> int:
    return definitions(LAB, starts=STARTS, **NAMES)["predicted_bytes"](layers, edge, inside, every)


# Exercise 3 -------------------------------------------------------------------------------------


def by_ratio(costs: list[Any], limit: int) -> set[int]:
    """Greedy: the most bytes per operation first, until the peak fits."""
    chosen: set[int] = set()
    order = sorted(range(len(costs)), key=lambda i: -costs[i].inside_bytes / costs[i].flops)
    for index in order:
        if activation_peak(costs, chosen) <= limit:
            break
        chosen.add(index)
    return chosen


def by_sum(costs: list[Any], limit: int) -> set[int]:
    """Fits the sum of what is kept, and forgets the block that is being recomputed."""
    sizes = sum(c.input_bytes for c in costs)
    sets = [s for n in range(len(costs) + 1) for s in itertools.combinations(range(len(costs)), n)]
    fits = [
        s
        for s in sets
        if sizes + sum(c.inside_bytes for i, c in enumerate(costs) if i not in s) <= limit
    ]
    return set(min(fits, key=lambda s: recompute_flops(costs, s), default=range(len(costs))))


def all_sets(fits: Callable[[int, int], bool]) -> Callable[[list[Any], int], set[int]]:
    """The cheapest of all sets whose peak and limit are found to fit."""

    def best_set(costs: list[Any], limit: int) -> set[int]:
        sets = [
            s for n in range(len(costs) + 1) for s in itertools.combinations(range(len(costs)), n)
        ]
        fit = [s for s in sets if fits(activation_peak(costs, s), limit)]
        return set(min(fit, key=lambda s: recompute_flops(costs, s)))

    return best_set


def free_of_charge(costs: list[Any], limit: int) -> set[int]:
    for cost in costs:
        object.__setattr__(cost, "flops", 0)
    return set(range(len(costs)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (all_sets(operator.lt), "`<=`, not `<`"),
        (free_of_charge, "changed the costs"),
        (lambda costs, limit: set(range(len(costs))), "times the optimum"),
        (lambda costs, limit: set(), "over the budget"),
        (lambda costs, limit: {len(costs) - 1}, "The last block gives nothing back"),
        (lambda costs, limit: {99}, "is no block"),
        (by_ratio, "good guess"),
        (by_sum, "sums of bytes saved"),
    ],
)
def test_sets_that_are_not_the_best(answer: Any, words: str) -> None:
    nudged(lab_05.best_set(answer), words)


def test_trying_all_sets_is_accepted() -> None:
    verdict = lab_05.best_set(all_sets(operator.le))
    assert verdict.status is Status.CORRECT
    assert verdict.score.startswith("1.000")


# Exercise 4 -------------------------------------------------------------------------------------
