"""The checks of lab 10: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_cases import answers, nudged, solved_lab, untouched_lab
from torch.utils.checkpoint import checkpoint

from utils.clinic import Patient
from utils.clinic.lab_ward import (
    CAUSES,
    WARD,
    after_cure,
    as_it_came,
    case_file,
    lab_patient,
)
from utils.labs import check
from utils.labs.checking import run_check
from utils.labs.verdict import Status
from utils.lessons.lesson_10 import checks as lab_10
from utils.lessons.lesson_10.round import Round

LAB = solved_lab("intermediate/10_oom_clinic")
NAMES = {"torch": torch, "F": F, "checkpoint": checkpoint}
STARTS = ("# BEGIN SOLUTION", "def cure_")
PATIENTS = sorted(WARD)


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return answers(LAB, *STARTS, **NAMES)


@pytest.mark.parametrize("number", PATIENTS)
def test_the_solution_is_correct(solved: dict[str, Any], number: int) -> None:
    verdict = lab_10._wrong_diagnosis(number, solved[f"patient_{number}"])
    assert verdict is None, verdict
    verdict = getattr(lab_10, f"patient_{number}")(solved[f"patient_{number}"])
    assert verdict.status is Status.CORRECT, verdict
    found, par = verdict.score.split(" after the cure, par ")
    assert found == par, "the solution reaches the par"


def test_the_untouched_lab_is_not_attempted() -> None:
    stubs = answers(untouched_lab("intermediate/10_oom_clinic"), *STARTS, **NAMES)
    assert sorted(stubs) == [f"patient_{number}" for number in PATIENTS]
    for name, answer in stubs.items():
        assert check(f"10.{name}", answer).status is Status.NOT_ATTEMPTED, name


@pytest.mark.parametrize("number", PATIENTS)
def test_a_patient_is_over_its_budget_for_the_stated_reason(number: int) -> None:
    """The same bar as for the lesson's: clearly over before, clearly under after, losses equal."""
    case, patient = WARD[number], lab_patient(number)
    before, after = as_it_came(number), after_cure(number)
    limit = patient.limit_bytes
    assert before.bytes > 1.03 * limit, f"{before.bytes} bytes are clearly over {limit}"
    assert after.bytes < 0.97 * limit, f"{after.bytes} bytes are clearly under {limit}"
    assert lab_10._other_numbers(before.losses, after.losses) == "", (
        "the cure leaves the losses alone"
    )
    peaks = before.run.breakdown, after.run.breakdown
    if not patient.fragments:
        worst = max(peaks[0], key=lambda category: peaks[0][category] - peaks[1][category])
        assert str(worst) in case.categories, f"the evidence is {worst}, not {case.categories}"
    assert 30 <= len(case_file(number).splitlines()) <= 60, "a script of 30 to 60 lines"


def answer_of(number: int, cure: Callable[[Patient], Any]) -> dict[str, Any]:
    """The right diagnosis, and a cure."""
    case = WARD[number]
    lines = case_file(number).splitlines()
    line = next(n for n, text in enumerate(lines, 1) if case.lines[0] in text)
    return {"cause": case.cause, "category": case.categories[0], "line": line, "cure": cure}


def edit(*changes: str) -> Callable[[Patient], Patient]:
    return lambda patient: patient.edited(dict(zip(changes[::2], changes[1::2], strict=True)))


WRONG_CURES = [
    (1, edit("            continue\n", "            import gc; gc.collect()\n            continue\n"),
     "This list can be reached"),
    (1, edit("            skipped.append(error)\n            continue\n",
             "            skipped.append(error)\n            loss = None\n            continue\n"),
     "An exception holds its traceback"),
    (1, edit("STEPS = 10", "STEPS = 4"), "still to be skipped"),
    (2, edit("ROWS, WIDTH = 2304", "ROWS, WIDTH = 1152"), "it is another loss"),
    (2, edit("F.cross_entropy(scores, torch.arange(len(texts)))",
             "sum(F.cross_entropy(s, t, reduction='sum') for s, t in zip(scores.split(128), "
             "torch.arange(len(texts)).split(128))) / len(texts)"), "How many rows of them"),
    (3, edit("        losses.append(loss.item())\n",
             "        losses.append(loss.item())\n        # empty_cache() on a GPU\n"),
     "wholly free"),
    (3, edit("            weight.add_(kept, alpha=1 / STEPS)",
             "            weight.copy_(kept)"), "each with the same weight"),
    (4, edit("lr=1e-3, fused=True", "lr=1e-3, foreach=False"), "The states stay"),
    (4, edit("lr=1e-3, fused=True", "lr=1e-3, fused=True, maximize=False"), "Which of the four"),
    (4, edit("torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
             "torch.optim.SGD(model.parameters(), lr=1e-3)"), "SGD has no moments"),
    (5, edit("        wanted = model[\"teacher\"](tokens).softmax(-1)",
             "        model.eval()\n        wanted = model[\"teacher\"](tokens).softmax(-1)"),
     "Autograd does not look at it"),
    (5, edit("wanted = model[\"teacher\"](tokens).softmax(-1)",
             "wanted = torch.full((8, 64, 256), 1 / 256)"), "learn from the same teacher"),
    (6, edit("            total = total + loss / PARTS", "            total = total + loss"),
     "each small batch counts one eighth"),
    (6, edit("total.backward()", "total.backward(retain_graph=True)"), "retain_graph keeps"),
    (7, edit("CONTEXT, WIDTH, HEADS = 1024", "CONTEXT, WIDTH, HEADS = 256"), "another problem"),
    (7, edit("        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)\n", "",
             "scores.softmax(-1) @ value",
             "F.scaled_dot_product_attention(query, key, value, is_causal=True)"), "looks both ways"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "cure", "words"), WRONG_CURES)
def test_wrong_cures_have_a_message_of_their_own(number: int, cure: Any, words: str) -> None:
    nudged(getattr(lab_10, f"patient_{number}")(answer_of(number, cure)), words)


@pytest.mark.parametrize("number", PATIENTS)
def test_a_patient_that_no_longer_trains_is_the_answer_s_fault(number: int) -> None:
    loss = "total" if number == 6 else "loss"
    answer = answer_of(number, edit(f"        {loss}.backward()\n", ""))
    nudged(run_check(getattr(lab_10, f"patient_{number}"), answer), "no longer trains")


@pytest.mark.parametrize("factor", ["loss", "(100 * loss / PARTS)"])
def test_gradients_of_another_size_are_seen(factor: str) -> None:
    cure = edit("            total = total + loss / PARTS",
                f"            {factor}.backward()\n            total = total + loss.detach() / PARTS",
                "        total.backward()\n", "")  # fmt: skip
    nudged(lab_10.patient_6(answer_of(6, cure)), "AdamW hides how large gradients are")


def test_every_patient_has_two_wrong_cures_and_messages_of_its_own() -> None:
    assert {number for number, *_ in WRONG_CURES} == set(PATIENTS), "none is left out"
    texts = [text for case in WARD.values() for text in (case.still_over, case.other_losses)]
    texts += [text for case in WARD.values() for text in case.wrong_cures.values()]
    assert len(set(texts)) >= len(texts) - 1, "messages are not shared"
    assert {case.cause for case in WARD.values()} == set(CAUSES), "each cause occurs once"


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("cause", "large logits", "Examine it"),
        ("cause", "kept graph", "who holds the frame"),
        ("cause", "a leak", '"kept graph"'),
        ("category", "parameters", "Which category"),
        ("category", "bits", "a category of bytes"),
        ("line", 20, "Which line makes"),
        ("line", 0, "1 to"),
        ("line", float("nan"), "a line number"),
        ("cure", lambda patient: None, "is to return a patient"),
        ("cure", lambda patient: patient, "came back as it went in"),
        ("cure", 3, "a function"),
    ],
)
def test_wrong_parts_of_a_diagnosis(part: str, value: Any, words: str) -> None:
    nudged(lab_10.patient_1(answer_of(1, WARD[1].cure) | {part: value}), words)


def test_a_larger_card_is_no_cure() -> None:
    import dataclasses

    def richer(patient: Patient) -> Patient:
        return dataclasses.replace(patient.edited({"lr=1e-3": "lr=0.001"}), limit_bytes=10**12)

    nudged(lab_10.patient_1(answer_of(1, richer)), "the budget was changed")


def test_an_edit_that_does_not_fit_is_the_learners_line() -> None:
    report = check("10.patient_6", answer_of(6, edit("no such text", "")))
    nudged(report.verdict, "stands 0 times")


def test_another_right_cure_passes() -> None:
    def cure(patient: Patient) -> Patient:
        return patient.edited({
            "    model[\"teacher\"].eval()\n": "    model[\"teacher\"].eval().requires_grad_(False)\n",
        })  # fmt: skip

    assert lab_10.patient_5(answer_of(5, cure)).status is Status.CORRECT


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("which_sum", "total_loss", "frees what a graph has saved"),
        ("which_sum", "both", "What does it free"),
        ("which_sum", 2, "total_loss"),
        ("waiting_batches", 8, "one worker's share"),
        ("waiting_batches", 6, "prepares several"),
        ("waiting_batches", 12, "prefetch_factor batches ahead"),
    ],
)
def test_the_questions_of_the_lesson(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_10, question)(answer), words)
    assert check("10.which_sum", " Total_Size").is_correct
    assert check("10.waiting_batches", np.int64(48)).is_correct


def test_a_round_keeps_count_and_never_grades_time(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    game = Round(minutes=1, seed=3, clock=lambda: now[0])
    assert sorted(game.order) == PATIENTS and Round(seed=3).order == game.order
    first = game.next()
    assert first == game.order[0] and "1 minute left" in capsys.readouterr().out
    wrong = dict.fromkeys(("cause", "category"), "kept graph") | {"line": 1, "cure": WARD[6].cure}
    assert not game.answer(6, **wrong).is_correct
    now[0] = 120.0
    assert game.answer(6, **answer_of(6, WARD[6].cure)).is_correct
    assert "patient 6: minute 2, 2 tries, after the end" in str(game)
    assert "1 of 7 cured" in str(game)
    with pytest.raises(ValueError, match="no patient 9"):
        game.answer(9)
    with pytest.raises(ValueError, match="more than 0 minutes"):
        Round(minutes=0)
