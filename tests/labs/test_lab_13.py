"""What lab 13's checks compare with: the programs that its text shows, and the pars."""

from __future__ import annotations

from lab_cases import solved_lab

from utils.lessons.lesson_13 import checks as lab_13
from utils.lessons.lesson_13.mistakes import like_1f1b
from utils.lessons.lesson_13.programs import BROKEN, OWN, best_cut, layer_problems


def test_the_lab_shows_the_broken_program() -> None:
    text = solved_lab("advanced/13_pipelines").read_text(encoding="utf-8")
    assert all(" ".join(row) in text for row in BROKEN)


def test_the_par_of_a_schedule_is_that_of_the_lesson() -> None:
    verdict = lab_13.own_schedule(like_1f1b(lambda rank, p: p - 1 - rank, kinds="IW"))
    found, par = (float(part.split()[0]) for part in verdict.score.split(", par "))
    assert par == sum(3 * m + p - 1 for p, m in OWN) < found


def test_the_optimum_is_that_of_all_cuts() -> None:
    seconds, stages = layer_problems()[1]
    cuts = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    times = [
        max(sum(seconds[:a]), sum(seconds[a : a + b]), sum(seconds[a + b :])) for a, b, _ in cuts
    ]
    assert best_cut(seconds, stages) == min(times)
