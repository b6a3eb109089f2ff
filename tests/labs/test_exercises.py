"""Every exercise that a lab names: solution, untouched lab, mistakes, and unusual right answers.

Its solution stands in the lab, its mistakes beside its check; here they only meet. What every check
must survive beside that is in `test_lab_hostile.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
from capstone_cases import drawn
from hostile_cases import right_answer
from lab_answers import exercises_of_labs, solution, stub
from lab_cases import nudged

from utils.labs import check
from utils.labs.cases import Question
from utils.labs.checking import checks_of, find, lab_numbers, run_check
from utils.labs.mistakes import KnownAnswer
from utils.labs.verdict import Status, Verdict
from utils.lessons import folders
from utils.lessons.lesson_99.cases import SEEDS

pytestmark = pytest.mark.deepspeed  # one lab's configurations are read by it
EXERCISES = exercises_of_labs()
CAPSTONE = "99"  # its sitting hands in, and draws each case by a seed
WITH_MISTAKES = [n for n, folder in folders().items() if (folder / "mistakes.py").is_file()]


NEAR_PAR = ["17.cheapest_run"]  # its solution tries 201 sizes of a model, its par is the optimum
SLOW = ["17.repaired_job"]  # where a Slurm is installed; `test_lab_17.py` tries it by stand-ins


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


def of_lesson(number: str) -> list[KnownAnswer]:
    return importlib.import_module(f"utils.lessons.lesson_{number}.mistakes").known.all


def known(is_right: bool) -> list[Any]:
    """Each known answer by its exercise, under every seed where the lab has seeds."""
    found = [(n, one) for n in WITH_MISTAKES for one in of_lesson(n) if one.is_right == is_right]
    return [
        pytest.param(
            f"{n}.{one.of}",
            seed,
            one,
            id=f"{n}.{one.of}-{one.name}" + (f"-seed {seed}" if seed else ""),
            marks=[pytest.mark.slow] if one.slow else [],
        )
        for n, one in found
        for seed in (SEEDS if n == CAPSTONE else [0])
    ]


def answer_of(name: str, seed: int, one: KnownAnswer) -> Any:
    if seed:
        return one.answer(drawn(name.partition(".")[2], seed))
    asked_with_its_answer = name in EXERCISES or isinstance(find(name), Question)
    return one.answer(right_answer(name) if asked_with_its_answer else None)


def verdict_on(name: str, answer: Any) -> Verdict:
    return run_check(find(name), answer)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", checks_of(CAPSTONE))
def test_the_model_answer_solves_every_seed(case: str, seed: int) -> None:
    verdict = verdict_on(f"{CAPSTONE}.{case}", drawn(case, seed))
    assert verdict.status is Status.CORRECT, verdict


@pytest.mark.parametrize(
    "name", marked(n for n in EXERCISES if n.partition(".")[0] in WITH_MISTAKES)
)
def test_the_solution_is_right_and_reaches_its_par(name: str) -> None:
    verdict = verdict_on(name, solution(name))
    assert verdict.status is Status.CORRECT, verdict
    for part in verdict.score.split(", with "):
        found, has_par, par = part.rpartition(", par ")
        assert not has_par or found.startswith(par) or name in NEAR_PAR, verdict.score


@pytest.mark.parametrize("name", EXERCISES)
def test_the_untouched_lab_is_not_attempted(name: str) -> None:
    assert check(name, stub(name)).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(("name", "seed", "mistake"), known(is_right=False))
def test_a_mistake_is_told_what_it_is(
    name: str, seed: int, mistake: KnownAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mistake.says, "Give the words of the sentence that it earns."
    if mistake.timeout_seconds:
        checks = f"utils.lessons.lesson_{name.partition('.')[0]}.checks"
        monkeypatch.setattr(f"{checks}.TIMEOUT_SECONDS", mistake.timeout_seconds)
    verdict = verdict_on(name, answer_of(name, seed, mistake))
    nudged(verdict, mistake.says)
    assert verdict.nudge or not seed, "a case tells a wrong idea something"


@pytest.mark.parametrize(("name", "seed", "variant"), known(is_right=True))
def test_an_unusual_right_answer_is_right(name: str, seed: int, variant: KnownAnswer) -> None:
    verdict = verdict_on(name, answer_of(name, seed, variant))
    assert verdict.status is Status.CORRECT, verdict
    assert variant.says in f"{verdict.note} {verdict.score}", verdict


QUESTIONS = {
    f"{number}.{name}": question
    for number in lab_numbers()
    for name, question in checks_of(number).items()
    if isinstance(question, Question)
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_knows_its_right_answer_and_its_wrong_ones(name: str) -> None:
    question = QUESTIONS[name]
    assert check(name, ...).status is Status.NOT_ATTEMPTED
    assert question(question.right).status is Status.CORRECT
    for answer, sentence in question.wrong.items():
        nudged(question(answer), sentence)
