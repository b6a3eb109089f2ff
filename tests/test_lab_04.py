"""The checks of lab 04: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab_cases import answers, nudged, solved_lab, untouched_lab
from rank_cases import nothing_left
from torch import nn

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_04 import checks as lab_04
from utils.ranks import run_ranks

LAB = solved_lab("beginner/04_four_ranks")
EXERCISES = ["by_hand", "exposed_seconds", "make_buckets", "accumulate", "deadlock"]


PARS = {
    "by_hand": "1 all-reduce, par 1",
    "make_buckets": "6 all-reduces, par 6",
    "accumulate": "148 bytes sent, par 148",
}
STARTS = ("def ", "check(", "missing_rank", "# BEGIN")
NAMES = {"torch": torch, "dist": dist, "F": F, "nn": nn}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return answers(LAB, *STARTS, **NAMES)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left() -> Any:
    run_ranks(os.getpid, 1)  # the server is meant to stay
    with nothing_left():
        yield


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    report = check(f"04.{exercise}", solved[exercise])
    assert report.status is Status.CORRECT, report
    assert report.verdict.score == PARS.get(exercise, "")


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    untouched = answers(untouched_lab("beginner/04_four_ranks"), *STARTS, **NAMES)
    assert check(f"04.{exercise}", untouched[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("ring_of_eight", 4, "That is the payload"),
        ("ring_of_eight", 8, "factor for eight"),
        ("ring_of_eight", "7 MB", "a number of MB"),
        ("ring_of_eight", 123, "into the formula"),
        ("bytes_under_amp", "half", "What dtype"),
        ("bytes_under_amp", True, '"half" or "same"'),
        ("repeated_items", 3, "left over"),
        ("repeated_items", 0, "rounded up"),
        ("ring_of_eight", float("nan"), "no finite number"),
    ],
)
def test_wrong_answers_to_questions_are_nudged(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_04, question)(answer), words)


def test_the_questions_accept_the_right_answers() -> None:
    right = {"ring_of_eight": 7.0, "bytes_under_amp": "same", "repeated_items": 5}
    for question, answer in right.items():
        assert getattr(lab_04, question)(answer).status is Status.CORRECT


def start(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def start_parameters_alone(model: nn.Module) -> None:
    for tensor in model.parameters():
        dist.broadcast(tensor.detach(), src=0)


def start_from_the_mean(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.detach())


def average(model: nn.Module) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter) / dist.get_world_size()


def average_by_tensor(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def add_up(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def divide_alone(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def average_a_copy(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.clone())


def divide_by_four(model: nn.Module) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter) / 4


def die(model: nn.Module) -> None:
    if dist.get_rank() == 2:
        os._exit(1)


def never_end(model: nn.Module) -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("share", "gather", "words"),
    [
        (lambda model: None, average, "You forgot to broadcast the start"),
        (start_parameters_alone, average, "model.buffers()"),
        (start_from_the_mean, average, "not to rank 0's model"),
        (start, add_up, "You forgot to divide by the world size"),
        (start, average_by_tensor, "copy its parts back"),
        (start, divide_by_four, "Is the 4 written into it?"),
        (start, average_a_copy, "only its own gradients"),
        (start, divide_alone, "divide once"),
        (start, die, "rank 2 ended by itself with exit code 1"),
        (start, lambda model: model.nothing, "has no attribute 'nothing'"),
    ],
)
def test_wrong_data_parallelism(share: Any, gather: Any, words: str) -> None:
    nudged(
        check("04.by_hand", {"start_together": share, "average_gradients": gather}).verdict, words
    )


def test_an_endless_loop_ends_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lab_04._on_ranks.__kwdefaults__, "timeout_seconds", 1.5)
    verdict = check("04.by_hand", {"start_together": start, "average_gradients": never_end}).verdict
    nudged(verdict, "did not finish within 1.5 s")
    nudged(verdict, "a loop that never ends")


def sending(sizes: Any, ranks: int, link: float) -> list[float]:
    return [2 * (ranks - 1) / ranks * size / link for size in sizes]


def hidden(sizes: Any, ranks: int, link: float, backward: float) -> float:
    return max(0.0, sum(sending(sizes, ranks, link)) - backward)


def below_zero(sizes: Any, ranks: int, link: float, backward: float) -> float:
    return sum(sending(sizes, ranks, link)) - backward


def always_hidden(sizes: Any, ranks: int, link: float, backward: float) -> float:
    return sending(sizes, ranks, link)[-1]


def never_alone(sizes: Any, ranks: int, link: float, backward: float) -> float:
    *before, last = sending(sizes, max(ranks, 2), link)
    return max(0.0, sum(before) - backward) + last


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (lambda sizes, ranks, link, backward: sum(sizes) / link, "That is the payload"),
        (lambda sizes, ranks, link, backward: sum(sending(sizes, ranks, link)), "all sending"),
        (hidden, "Does the last bucket hide?"),
        (below_zero, "never negative"),
        (always_hidden, "the last bucket alone"),
        (never_alone, "nobody to send to"),
        (lambda sizes, ranks, link, backward: 0.03, "begins when backward ends"),
        (lambda sizes, ranks, link, backward: None, "Is there a `return`?"),
    ],
)
def test_wrong_seconds(formula: Any, words: str) -> None:
    nudged(lab_04.exposed_seconds(formula), words)


def test_a_list_that_is_emptied_on_the_way() -> None:
    def emptied(sizes: Any, ranks: int, link: float, backward: float) -> float:
        done = 0.0
        while len(sizes) > 1:
            done += sending([sizes.pop(0)], ranks, link)[0]
        return max(done, backward) + sending(sizes, ranks, link)[0] - backward

    for _ in range(2):
        assert lab_04.exposed_seconds(emptied).status is Status.CORRECT


def greedy(order: Any, fits: Any) -> Any:
    def make_buckets(sizes: list[int], cap: int) -> list[list[int]]:
        buckets: list[list[int]] = []
        for index in order(len(sizes)):
            total = sum(sizes[i] for i in buckets[-1]) if buckets else cap + 1
            if fits(total, sizes[index], cap):
                buckets[-1].append(index)
            else:
                buckets.append([index])
        return buckets

    return make_buckets


def backwards(count: int) -> range:
    return range(count - 1, -1, -1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (greedy(range, lambda total, size, cap: total < cap), "last layer's gradients first"),
        (greedy(backwards, lambda total, size, cap: total + size <= cap), "before it had reached"),
        (greedy(backwards, lambda total, size, cap: False), "before it had reached"),
        (greedy(backwards, lambda total, size, cap: total <= cap), "one more parameter went in"),
        (lambda sizes, cap: [[0]], "exactly one bucket"),
        (lambda sizes, cap: [[i] for i in backwards(len(sizes))] + [[]], "no bucket is empty"),
        (lambda sizes, cap: [[3, 4], [1, 2], [0]], "Keep the order"),
    ],
)
def test_wrong_buckets(answer: Any, words: str) -> None:
    nudged(lab_04.make_buckets(answer), words)


def accumulating(scale: Any, quiet: bool = True) -> Any:
    def accumulate(model: Any, parts: list[Any]) -> None:
        tokens = torch.tensor(sum(len(targets) for _, targets in parts))
        local = tokens.item()
        dist.all_reduce(tokens)
        for number, (inputs, targets) in enumerate(parts):
            model.require_backward_grad_sync = number == len(parts) - 1 or not quiet
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            (loss * scale(tokens.item(), local, len(targets), len(parts))).backward()

    return accumulate


@pytest.mark.parametrize(
    ("scale", "quiet", "words"),
    [
        (lambda total, local, here, parts: 1 / here / parts, True, "micro-batches' means"),
        (lambda total, local, here, parts: 1 / total, True, "Who multiplies by it"),
        (lambda total, local, here, parts: 1 / local, True, "this rank's tokens"),
        (lambda total, local, here, parts: 1.0, True, "of all ranks."),
        (lambda total, local, here, parts: 2 / total, False, "no_sync()"),
    ],
)
def test_wrong_accumulation(scale: Any, quiet: bool, words: str) -> None:
    nudged(lab_04.accumulate(accumulating(scale, quiet)), words)


def in_one_forward(model: Any, parts: list[Any]) -> None:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    tokens = torch.tensor(len(targets))
    dist.all_reduce(tokens)
    loss = F.cross_entropy(model(inputs), targets, reduction="sum")
    (loss * dist.get_world_size() / tokens.item()).backward()


def test_one_forward_over_all_micro_batches_spares_nothing() -> None:
    nudged(lab_04.accumulate(in_one_forward), "accumulation is there to spare that")


def mean_of_two(loss: torch.Tensor) -> float:
    loss = loss.nan_to_num()
    dist.all_reduce(loss)
    return loss.item() / 2


def test_the_collective_may_be_spelled_as_the_course_does() -> None:
    answer = {"rank": 2, "collective": "all-gather", "cure": mean_of_two}
    nudged(lab_04.deadlock(answer), "Is the 2 written into it")
    assert lab_04.deadlock(answer | {"cure": report}).status is Status.CORRECT


def report(loss: torch.Tensor) -> float:
    losses = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    return torch.stack(losses).nanmean().item()


def mean_with_the_nan(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def mean_of_all_but_one(loss: torch.Tensor) -> float:
    loss = loss.nan_to_num()
    dist.all_reduce(loss)
    return loss.item() / (dist.get_world_size() - 1)


def mean_with_zeros(loss: torch.Tensor) -> float:
    loss = loss.nan_to_num()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def written_in(loss: torch.Tensor) -> float:
    return 1.5


def as_a_tensor(loss: torch.Tensor) -> torch.Tensor:
    return torch.tensor(report(loss))


def still_early(loss: torch.Tensor) -> float:
    return loss.item() if loss.isnan() else report(loss)


@pytest.mark.parametrize(
    ("rank", "collective", "cure", "words"),
    [
        (0, "all_gather", report, "waits in no collective"),
        (2, "barrier", report, "It stood in"),
        ("2", "all_gather", report, "the number of a rank"),
        (2, "all_gather", mean_with_the_nan, "no finite number"),
        (2, "all_gather", mean_with_zeros, "A NaN is no loss of 0"),
        (2, "all_gather", mean_of_all_but_one, "Here two ranks have no loss"),
        (2, "all_gather", written_in, "Is it written into it?"),
        (2, "all_gather", as_a_tensor, "`.item()`"),
        (2, "dist.all_gather()", still_early, "a collective that not all ranks call"),
    ],
)
def test_wrong_diagnoses(rank: Any, collective: Any, cure: Any, words: str) -> None:
    answer = {"rank": rank, "collective": collective, "cure": cure}
    nudged(lab_04.deadlock(answer), words)
