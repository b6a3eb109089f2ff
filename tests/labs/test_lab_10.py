"""Lab 10's patients and its round: each is over its budget for the stated reason, time is not graded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from utils.clinic.lab_ward import CAUSES, WARD, after_cure, as_it_came, case_file, lab_patient
from utils.lessons.lesson_10 import checks as lab_10
from utils.lessons.lesson_10.mistakes import known
from utils.lessons.lesson_10.round import Round

pytestmark = pytest.mark.long

PATIENTS = sorted(WARD)


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


def test_every_patient_has_two_wrong_cures_and_messages_of_its_own() -> None:
    cures = Counter(
        one.of for one in known.all if isinstance(one.given, dict) and "cure" in one.given
    )
    assert all(cures[f"patient_{number}"] > 2 for number in PATIENTS), "one of them has no backward"
    texts = [text for case in WARD.values() for text in (case.still_over, case.other_losses)]
    texts += [text for case in WARD.values() for text in case.wrong_cures.values()]
    assert len(set(texts)) >= len(texts) - 1, "messages are not shared"
    assert {case.cause for case in WARD.values()} == set(CAUSES), "each cause occurs once"


def answer_of(number: int) -> dict[str, Any]:
    """The right diagnosis, and the ward's own cure."""
    case = WARD[number]
    lines = case_file(number).splitlines()
    line = next(n for n, text in enumerate(lines, 1) if case.lines[0] in text)
    return {"cause": case.cause, "category": case.categories[0], "line": line, "cure": case.cure}


def test_a_round_keeps_count_and_never_grades_time(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    game = Round(minutes=1, seed=3, clock=lambda: now[0])
    assert sorted(game.order) == PATIENTS and Round(seed=3).order == game.order
    first = game.next()
    assert first == game.order[0] and "1 minute left" in capsys.readouterr().out
    wrong = dict.fromkeys(("cause", "category"), "kept graph") | {"line": 1, "cure": WARD[6].cure}
    assert not game.answer(6, **wrong).is_correct
    now[0] = 120.0
    assert game.answer(6, **answer_of(6)).is_correct
    assert "patient 6: minute 2, 2 tries, after the end" in str(game)
    assert "1 of 7 cured" in str(game)
    with pytest.raises(ValueError, match="no patient 9"):
        game.answer(9)
    with pytest.raises(ValueError, match="more than 0 minutes"):
        Round(minutes=0)
