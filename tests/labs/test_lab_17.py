"""Lab 17 beside its exercises: the job that it hands out, a real Slurm, its markets, offers and matrix."""

from __future__ import annotations

import math

import pytest
from lab_answers import solution

from utils.labs.mistakes import KnownAnswer
from utils.labs.verdict import Status
from utils.lessons.lesson_17 import checks as lab_17
from utils.lessons.lesson_17 import repairs
from utils.lessons.lesson_17.budget import _markets, lab_offers
from utils.lessons.lesson_17.clusters import slurm_problem
from utils.lessons.lesson_17.matrix import KINDS, LINES
from utils.lessons.lesson_17.mistakes import known
from utils.lessons.lesson_17.scaling import REPLICATION
from utils.lessons.lesson_17.stubs import try_script

pytestmark = pytest.mark.long

RIGHT_JOBS = [one for one in known.all if one.of == "repaired_job" and one.is_right]


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_17, "slurm_problem", lambda: "Slurm is not installed here: recorded.")


def test_the_solution_is_correct_by_stubs(without_slurm: None) -> None:
    verdict = lab_17.repaired_job(solution("17.repaired_job"))
    assert verdict.status is Status.CORRECT and "stubs" in verdict.note, verdict


@pytest.mark.parametrize("one", RIGHT_JOBS, ids=lambda one: one.name)
def test_a_right_script_in_another_way_is_correct_by_stubs(
    one: KnownAnswer, without_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_17, "_training", lambda train: None)
    verdict = lab_17.repaired_job(one.answer(solution("17.repaired_job")))
    assert verdict.status is Status.CORRECT, verdict


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_problem()), reason=slurm_problem())
def test_the_solution_is_correct_under_a_real_slurm() -> None:
    verdict = lab_17.repaired_job(solution("17.repaired_job"))
    assert verdict.status is Status.CORRECT and "a real Slurm" in verdict.note, verdict


def test_the_handed_out_job_is_broken_in_all_ways() -> None:
    text, train = repairs.broken("job.slurm"), repairs.broken("train.py")
    assert repairs.options_of(text) == {
        "--job-name": "lab-17",
        "--nodes": "2",
        "--ntasks-per-node": "1",
        "--time": "5",
        "--output": "out.txt",
    }
    found = try_script(text, codes={0: 75, 1: 75}, tasks=2)
    assert [row[:3] for row in found.ranks] == [
        ("0", "2", "n1"),
        ("1", "2", "n1"),
        ("1", "2", "n2"),
        ("2", "2", "n2"),
    ]
    assert (found.ended, found.requeued) == ([0, 0], []), "its shells forget how their ranks ended"
    assert found.patience_seconds == 0, "the first rank that saved would end the others"
    for children in (True, False):
        assert try_script(text, signal_to="tasks", children=children, tasks=2).ended == [138, 138]
    codes = repairs.try_training(train, lab_17.TIMEOUT_SECONDS).codes
    assert codes[:2] != (75, 75), "ranks are told at different moments"


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ("", math.inf),
        ("--kill-on-bad-exit=0 --wait=60", 60),
        ("-K0 -W 300", 300),
        ("--wait 5 -N2", 5),
        ("-W7", 7),
        ("--wait=0", math.inf),
        ("--wait=60 --kill-on-bad-exit", 0),
        ("-K1 --wait=60", 0),
        ("-K", 0),
    ],
)
def test_how_long_srun_lets_tasks_go_on_is_read_from_its_options(
    options: str, seconds: float
) -> None:
    found = try_script(f"#!/bin/bash\nsrun {options} bash -c 'exit 3'\nexit $?\n", tasks=2)
    assert (found.patience_seconds, found.ended) == (seconds, [3, 3]), found.said


def test_the_markets_bind_by_deadline_memory_service_and_not_at_all() -> None:
    found = {market.says: market.best() for market in _markets()}
    assert [row is None for row in found.values()].count(True) == 3
    names = [row.offer.name for row in found.values() if row]
    assert {"A100", "H100", "A10"} == set(names), names
    in_time = found["the same loss in 5 days, three kinds"]
    assert in_time and in_time.offer.name == "A100" and in_time.nodes > 8, in_time


def test_the_matrix_has_right_lines_and_every_kind_of_mistake() -> None:
    assert {line.kind for line in LINES} == set(KINDS), "each kind stands once or more"
    assert [line.kind for line in LINES].count("right") == 6, "the lab's hint says six"
    assert all(line.hint for line in LINES if line.kind != "right"), "a mistake needs its hint"


def test_offers_are_dated_and_their_law_is_named() -> None:
    assert all(offer.as_of for offer in lab_offers()), "a price needs its day"
    assert "2404.10102" in REPLICATION.source
