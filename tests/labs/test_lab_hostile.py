"""Every check of the course against junk: no junk is right, none is called the course's fault.

And right answers in another form are right: numpy's numbers, the keys of a dict in another order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hostile_cases import (
    CODE,
    JUNK,
    NUMERIC,
    OF_RANKS,
    SLOW_PARTS,
    all_exercises,
    in_numpy,
    numpied,
    returning,
    right_answer,
    takes_parts,
    values,
)
from lab_cases import nudged
from torch.utils.checkpoint import checkpoint

from utils.labs import check
from utils.labs.cases import Exercise, Question
from utils.labs.checking import find, run_check
from utils.labs.stubs import untouched
from utils.labs.verdict import Report, Status
from utils.lessons.lesson_06 import checks as lab_06

pytestmark = pytest.mark.deepspeed  # a right answer of lab 09 is read by DeepSpeed
EXERCISES = all_exercises()
WITHOUT_RANKS = [name for name in EXERCISES if name not in OF_RANKS]
OF_PARTS = [name for name in WITHOUT_RANKS if takes_parts(name) and name not in SLOW_PARTS]


@pytest.fixture(autouse=True)
def nothing_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one check that simulates takes seconds a call; here, whatever is asked fits."""
    fits = SimpleNamespace(peak_bytes=20 * 10**9, peak_phase="forward")
    monkeypatch.setattr(lab_06, "simulated_finetune", lambda *choice: fits)


def problem(name: str, answer: Any) -> str:
    """What is wrong with how a check met junk; "" if it is a short "not yet"."""
    report = Report(name, run_check(find(name), answer))
    if report.status is not Status.NOT_YET:
        return str(report)
    if not (report.verdict.note or report.verdict.rows()):
        return "says nothing"
    return "" if len(report._repr_html_()) < 5000 else "its report is too long"


def problems(name: str, answers: dict[str, Any]) -> dict[str, str]:
    found = {label: problem(name, answer) for label, answer in answers.items()}
    return {label: text for label, text in found.items() if text}


@pytest.mark.parametrize("name", EXERCISES)
def test_every_check_declares_what_it_takes(name: str) -> None:
    found = find(name)
    assert isinstance(found, (Question, Exercise)) or hasattr(found, "kind")


@pytest.mark.parametrize("name", EXERCISES)
def test_junk_is_sent_back(name: str) -> None:
    assert problems(name, JUNK) == {}


@pytest.mark.parametrize("name", WITHOUT_RANKS)
def test_functions_that_give_junk_are_sent_back(name: str) -> None:
    assert problems(name, CODE | {label: returning(junk) for label, junk in JUNK.items()}) == {}


def test_functions_that_give_junk_on_ranks_are_sent_back() -> None:
    nothing, nan = returning(None), returning(float("nan"))
    for answer in (nothing, nan):
        deadlock = {"rank": 2, "collective": "all_gather", "cure": answer}
        assert problem("04.deadlock", deadlock) == ""
    assert problem("04.by_hand", {"start_together": nothing, "average_gradients": nan}) == ""
    assert problem("04.accumulate", nan) == ""
    ring = ("11.ordered_ring", "11.tree_broadcast", "12.row_parallel", "18.cache_attention")
    for name in ("09.zero_1", *ring, "19.dispatch_once"):
        assert problem(name, nan) == ""


@pytest.mark.parametrize(
    "name", ["02.amp_step", "02.measured_peak", "02.kept_by_module", "07.streamed"]
)
def test_gradients_that_a_right_answer_leaves_off_are_told_and_switched_on(name: str) -> None:
    right = right_answer(name)

    def answer(*args: Any) -> Any:
        torch.set_grad_enabled(True)
        try:
            return right(*args)
        finally:
            torch.set_grad_enabled(False)

    nudged(run_check(find(name), answer), "gradients are off after your function")
    assert torch.is_grad_enabled()


def test_a_borrowed_checkpoint_is_given_back() -> None:
    def borrowed(block: Any, x: Any) -> Any:
        return checkpoint(block, x, use_reentrant=False)

    nudged(run_check(find("05.checkpointed"), borrowed), "it calls torch.utils.checkpoint")
    assert checkpoint is torch.utils.checkpoint.checkpoint
    assert checkpoint.__module__.startswith("torch.utils")


def test_an_iterator_that_ends_in_an_answer_is_shown_with_its_line() -> None:
    for name in ("05.chunked_loss", "06.merged_weight"):
        verdict = run_check(find(name), CODE["nothing left"])
        nudged(verdict, "your code raised StopIteration")
        nudged(verdict, "in nothing_left: return next(iter(()))")
        nudged(verdict, "Give it a default")


@pytest.mark.parametrize("name", OF_PARTS)
def test_a_part_that_is_junk_is_sent_back(name: str) -> None:
    right = right_answer(name)
    for key in right:
        parts = JUNK | {f"gives {label}": returning(junk) for label, junk in JUNK.items()}
        assert problems(name, {label: right | {key: part} for label, part in parts.items()}) == {}
        assert problem(name, {k: v for k, v in right.items() if k != key}) == ""
        assert problem(name, {(k if k != key else "other"): v for k, v in right.items()}) == ""
    assert problem(name, right | {"one more": 1}) == ""


@pytest.mark.parametrize("name", OF_PARTS)
def test_swapped_values_are_sent_back(name: str) -> None:
    keys = list(right_answer(name))
    swapped = dict(zip(keys, right_answer(name).values(), strict=True))
    swapped[keys[0]], swapped[keys[-1]] = swapped[keys[-1]], swapped[keys[0]]
    assert problem(name, swapped) == ""


@pytest.mark.parametrize("name", OF_PARTS)
def test_the_keys_of_a_dict_may_stand_in_any_order(name: str) -> None:
    for answer in (
        right_answer(name),
        dict(reversed(right_answer(name).items())),
        in_numpy(right_answer(name)),
    ):
        verdict = run_check(find(name), answer)
        assert verdict.status is Status.CORRECT, verdict


@pytest.mark.parametrize("name", values())
def test_right_values_may_be_numbers_of_numpy(name: str) -> None:
    right = right_answer(name)
    is_number = isinstance(right, (int, float))
    other = [np.float32(right), np.float64(right), float(right)] if is_number else []
    for answer in [right, *other, in_numpy(right)]:
        verdict = run_check(find(name), answer)
        assert verdict.status is Status.CORRECT, (answer, verdict)


@pytest.mark.parametrize(
    "name", [f"{n}.{exercise}" for n, names in NUMERIC.items() for exercise in names]
)
def test_right_functions_may_return_numbers_of_numpy(name: str) -> None:
    right = right_answer(name)
    for answer in (right, numpied(right)):
        verdict = run_check(find(name), answer)
        assert verdict.status is Status.CORRECT, verdict


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_neither_untouched_nor_too_much_for_the_door(junk: str) -> None:
    assert untouched(JUNK[junk]) == "" and untouched({"a": JUNK[junk]}) == ""
    assert check("01.momentum_bytes", JUNK[junk]).status is Status.NOT_YET


@pytest.mark.parametrize("letters", [10**7, pytest.param(10**8, marks=pytest.mark.slow)])
def test_millions_of_letters_make_a_short_report(letters: int) -> None:
    report = check("01.peak_moves", "x" * letters)
    assert report.status is Status.NOT_YET and len(report._repr_html_()) < 5000
    report = check("01.state_bytes", lambda count, optimizer: "x" * letters)
    assert report.status is Status.NOT_YET and len(report._repr_html_()) < 5000
