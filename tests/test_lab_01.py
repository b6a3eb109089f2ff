"""The checks of lab 01: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jupytext
import pytest
import torch
import torch.nn.functional as F
from lab_cases import definitions, nudged, solved_lab
from torch import nn

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_01 import checks as lab_01
from utils.lessons.lesson_01 import ledger as ledger_01

LAB = solved_lab("beginner/01_where_memory_goes")
READ_RIGHT = {
    "phase of the peak": "optimizer step",
    "temporaries / parameters at the peak": 2,
    "half the batch lowers the peak by a tenth or more": False,
}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB, "\nfound = ", torch=torch, F=F, nn=nn)


EXERCISES = ["state_bytes", "saved_bytes", "largest_batch", "cured_step", "lean_step"]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    assert getattr(lab_01, exercise)(solved[exercise]).status is Status.CORRECT


def test_the_questions_accept_the_right_answers() -> None:
    assert lab_01.momentum_bytes(12).status is Status.CORRECT
    assert lab_01.doubled_batch(10).status is Status.CORRECT
    assert lab_01.peak_moves("less").status is Status.CORRECT
    assert lab_01.read_timeline(READ_RIGHT).status is Status.CORRECT


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("momentum_bytes", 16, "That is Adam"),
        ("momentum_bytes", 3, "how many numbers"),
        ("momentum_bytes", 20, "four bytes each"),
        ("momentum_bytes", [4, 4, 4], "one number"),
        ("momentum_bytes", float("nan"), "no finite number"),
        ("momentum_bytes", True, "one number"),
        ("doubled_batch", 12, "doubles everything"),
        ("doubled_batch", 8, "Which part"),
        ("doubled_batch", "10 GiB", "a number of GiB"),
        ("peak_moves", "half", "end of backward"),
        ("peak_moves", True, '"half" or "less"'),
    ],
)
def test_wrong_answers_to_questions_are_nudged(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_01, question)(answer), words)


@pytest.mark.parametrize(
    ("key", "answer", "words"),
    [
        ("phase of the peak", "backward", "triangle"),
        ("temporaries / parameters at the peak", 1, "blue block"),
        ("temporaries / parameters at the peak", float("nan"), "no finite number"),
        ("half the batch lowers the peak by a tenth or more", 0, "without quotes"),
        ("half the batch lowers the peak by a tenth or more", True, "that grows with the batch"),
    ],
)
def test_a_misread_timeline_is_nudged(key: str, answer: Any, words: str) -> None:
    nudged(lab_01.read_timeline(READ_RIGHT | {key: answer}), words)


def test_states_in_numbers_instead_of_bytes() -> None:
    numbers = {"sgd": 2, "momentum": 3, "adam": 4}
    nudged(lab_01.state_bytes(lambda p, name: numbers[name] * p), "counts numbers")


def test_states_without_gradients() -> None:
    numbers = {"sgd": 1, "momentum": 2, "adam": 3}
    nudged(lab_01.state_bytes(lambda p, name: 4 * numbers[name] * p), "is missing")


def test_states_of_adam_for_all() -> None:
    nudged(lab_01.state_bytes(lambda p, name: 16 * p), "does this optimizer keep")


def ledger(counted: Callable[[list[torch.Tensor], set[int]], int]) -> Callable[..., int]:
    def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
        own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = model(inputs)
        total = counted(kept, own)
        del output
        return total

    return saved_bytes


def storages(kept: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in kept]


def test_a_ledger_that_counts_views_twice() -> None:
    answer = ledger(lambda kept, own: sum(n for p, n in storages(kept) if p not in own))
    nudged(lab_01.saved_bytes(answer), "counted twice")


def test_a_ledger_that_counts_parameters() -> None:
    answer = ledger(lambda kept, own: sum(dict(storages(kept)).values()))
    nudged(lab_01.saved_bytes(answer), "what the model owns")


def test_a_ledger_that_counts_elements() -> None:
    answer = ledger(lambda kept, own: sum(t.numel() for t in kept))
    nudged(lab_01.saved_bytes(answer), "not of views or elements")


def test_a_ledger_that_counts_buffers() -> None:
    def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
        return ledger_01.ledger(model, inputs, own=[*model.parameters()])

    nudged(lab_01.saved_bytes(saved_bytes), "counts a buffer")


def test_a_ledger_of_views() -> None:
    def by_view(kept: list[torch.Tensor], own: set[int]) -> int:
        return sum({t.data_ptr(): t.nbytes for t in kept if t.data_ptr() not in own}.values())

    nudged(lab_01.saved_bytes(ledger(by_view)), "not of views")


def test_a_search_by_a_straight_line() -> None:
    def largest_batch(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
        one, two = peak_bytes_at(1), peak_bytes_at(2)
        return max(0, (limit_bytes - 2 * one + two) // (two - one))

    assert lab_01.largest_batch(largest_batch).status is Status.NOT_YET


def test_a_ledger_that_is_a_constant() -> None:
    torch.manual_seed(1)
    right = ledger_01.ledger(ledger_01.SavesAView(), torch.randn(16, 32))
    nudged(lab_01.saved_bytes(lambda model, inputs: right), "Is anything fixed")


def test_a_ledger_that_gives_the_output() -> None:
    nudged(lab_01.saved_bytes(lambda model, inputs: model(inputs)), "a whole number of bytes")
    nudged(lab_01.saved_bytes(lambda model, inputs: model(inputs).sum()), "`.item()`")


def test_a_ledger_whose_tensors_are_gone_while_it_counts() -> None:
    def saved_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
        own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            model(inputs)
        return sum(kept.values())

    nudged(lab_01.saved_bytes(saved_bytes), "The address of one that is gone is used again")


def search(
    peak_bytes_at: Callable[[int], int], limit_bytes: int, fits: Any = None, first: int = 1
) -> int:
    """The solution, with another comparison or another first batch."""
    fits = fits or (lambda batch: peak_bytes_at(batch) <= limit_bytes)
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def test_a_search_that_leaves_out_the_limit_itself() -> None:
    verdict = lab_01.largest_batch(lambda p, n: search(p, n, lambda batch: p(batch) < n))
    nudged(verdict, "A peak that equals the limit still fits")


def test_a_search_that_begins_with_a_huge_batch() -> None:
    nudged(lab_01.largest_batch(lambda p, n: search(p, n, first=1 << 20)), "ran out of memory")

    def catches(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
        def fits(batch: int) -> bool:
            try:
                return peak_bytes_at(batch) <= limit_bytes
            except Exception:  # noqa: BLE001
                return False

        return search(peak_bytes_at, limit_bytes, fits, first=1 << 20)

    nudged(lab_01.largest_batch(catches), "Begin at 1, and double")


def test_a_search_with_a_single_guess_is_told_to_measure_it() -> None:
    def line(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
        one, two = peak_bytes_at(1), peak_bytes_at(2)
        return max(0, (limit_bytes - 2 * one + two) // (two - one))

    nudged(lab_01.largest_batch(line), "measure the guess and its neighbours")


def test_the_par_is_what_the_solution_takes(solved: dict[str, Any]) -> None:
    par = lab_01.PAR_CALLS
    verdict = lab_01.largest_batch(solved["largest_batch"])
    assert verdict.score == f"{par} measurements at most, par {par}"


def test_functions_that_return_nothing() -> None:
    nudged(lab_01.state_bytes(lambda p, name: None), "returns nothing")
    nudged(lab_01.largest_batch(lambda peak, limit: None), "returns nothing")


def test_a_search_that_tries_every_batch() -> None:
    def largest_batch(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
        batch = 0
        while peak_bytes_at(batch + 1) <= limit_bytes:
            batch += 1
        return batch

    nudged(lab_01.largest_batch(largest_batch), "halve the distance")


def test_a_search_that_only_doubles() -> None:
    def largest_batch(peak_bytes_at: Callable[[int], int], limit_bytes: int) -> int:
        batch = 1
        while peak_bytes_at(2 * batch) <= limit_bytes:
            batch *= 2
        return batch

    nudged(lab_01.largest_batch(largest_batch), "power of two")


def test_a_search_that_is_one_too_high(solved: dict[str, Any]) -> None:
    nudged(lab_01.largest_batch(lambda p, n: solved["largest_batch"](p, n) + 1), "does not fit")


def test_a_search_that_forgets_that_one_may_fail(solved: dict[str, Any]) -> None:
    nudged(lab_01.largest_batch(lambda p, n: max(1, solved["largest_batch"](p, n))), "Not even one")


def training(model: Any, optimizer: Any, inputs: Any, labels: Any, **backward: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward(**backward)
    optimizer.step()
    return loss


def test_a_cure_that_still_keeps_tensors() -> None:
    def cured_step(*args: Any) -> None:
        args[-1].append(training(*args[:4]))

    nudged(lab_01.cured_step(cured_step), "loss.item()")


def test_a_cure_that_hides_the_graph_elsewhere() -> None:
    kept = []

    def cured_step(*args: Any) -> None:
        kept.append(training(*args[:4], retain_graph=True))
        args[-1].append(kept[-1].item())

    nudged(lab_01.cured_step(cured_step), "holds the graph")


def test_a_cure_that_retains_the_graph_for_the_step() -> None:
    def cured_step(*args: Any) -> None:
        args[-1].append(training(*args[:4], retain_graph=True).item())

    nudged(lab_01.cured_step(cured_step), "backward frees nothing")


@pytest.mark.parametrize("retains", [False, True])
def test_gradients_may_be_filled_with_zeros_and_stay(retains: bool) -> None:
    def cured_step(model: Any, optimizer: Any, inputs: Any, labels: Any, history: list) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward(retain_graph=retains)
        optimizer.step()
        history.append(loss.item())

    verdict = lab_01.cured_step(cured_step)
    if retains:
        nudged(verdict, "backward frees nothing")
    else:
        assert verdict.status is Status.CORRECT, verdict


def test_a_cure_that_leaks_something_else() -> None:
    kept = []

    def cured_step(*args: Any) -> None:
        kept.append(torch.zeros(1000))
        args[-1].append(training(*args[:4]).item())

    nudged(lab_01.cured_step(cured_step), "of other still alive")


def test_a_cure_that_trains_otherwise() -> None:
    def cured_step(model: Any, optimizer: Any, inputs: Any, labels: Any, history: list) -> None:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        history.append(loss.item())

    nudged(lab_01.cured_step(cured_step), "The order is")


def test_a_cure_that_records_nothing() -> None:
    nudged(lab_01.cured_step(lambda *args: training(*args[:4]) and None), "one Python number")


def in_parts(parts: int, divide: bool = True, early: bool = True, late: bool = False) -> Any:
    """A step over parts of the batch, with what may go wrong in it."""

    def lean_step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
        if early:
            optimizer.zero_grad()
        losses = []
        for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            losses.append(F.cross_entropy(model(x), y) / (parts if divide else 1))
            if not late:
                losses.pop().backward()
        if late:
            sum(losses).backward()
        optimizer.step()

    return lean_step


def test_a_lean_step_that_is_as_wasteful_as_before() -> None:
    def lean_step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    nudged(lab_01.lean_step(lean_step), "old gradients are alive")


def test_a_lean_step_that_frees_gradients_early_alone() -> None:
    nudged(lab_01.lean_step(in_parts(1)), "Must the whole batch be in memory at once?")


def test_a_lean_step_in_too_few_parts() -> None:
    nudged(lab_01.lean_step(in_parts(4)), "change with the size of a part")


def test_a_lean_step_whose_parts_live_until_one_backward() -> None:
    nudged(lab_01.lean_step(in_parts(4, late=True)), "does a graph of one part stay")


def test_a_lean_step_that_sums_the_parts() -> None:
    nudged(
        lab_01.lean_step(in_parts(32, divide=False)), "the mean over a part have to be divided by"
    )


def test_a_lean_step_may_split_as_it_likes_and_has_its_par(solved: dict[str, Any]) -> None:
    assert lab_01.lean_step(in_parts(128)).status is Status.CORRECT
    verdict = lab_01.lean_step(solved["lean_step"])
    score, _, par = verdict.score.partition(" at the peak, par ")
    assert score == par and "times lower" in verdict.note, verdict


def test_a_lean_step_that_adds_old_gradients() -> None:
    def lean_step(model: Any, optimizer: Any, inputs: Any, labels: Any) -> None:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    nudged(lab_01.lean_step(lean_step), "Do old gradients stay")


def test_a_lean_step_that_does_nothing() -> None:
    nudged(lab_01.lean_step(lambda *args: None), "could not be measured")


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    notebook = jupytext.read(LAB.parents[3] / "labs/beginner/01_where_memory_goes.ipynb")
    cells = [c.source for c in notebook.cells if c.source.startswith(f"def {exercise}(")]
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(cells[0].split("\ncheck(")[0], names)
    assert check(f"01.{exercise}", names[exercise]).status is Status.NOT_ATTEMPTED
