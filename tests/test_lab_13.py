"""Lab 13's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lab_cases import definitions, nudged, solved_lab, untouched_lab

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_13 import checks as lab_13
from utils.lessons.lesson_13.programs import BROKEN, OWN, STUCK, best_cut, layer_problems
from utils.planner.schedules import order

EXERCISES = ["one_f_one_b", "stuck", "own_schedule", "cut_layers"]
STARTS = tuple(f"def {exercise}(" for exercise in EXERCISES)
NAMES = {"re": re}


@functools.cache
def solved() -> dict[str, Any]:
    return definitions(solved_lab("advanced/13_pipelines"), starts=STARTS, **NAMES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(exercise: str) -> None:
    verdict = check(f"13.{exercise}", solved()[exercise]).verdict
    assert verdict.status is Status.CORRECT, verdict
    if verdict.score:
        found, par = verdict.score.split(", par ")
        assert found.startswith(par), "the solution reaches the par"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    stubs = definitions(untouched_lab("advanced/13_pipelines"), starts=STARTS, **NAMES)
    assert check(f"13.{exercise}", stubs[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("micro_batches", 70, {80: "p - 1 passes", 63: "compared with the work", 7: "Which m"}),
        (
            "messages",
            736,
            {
                224: "24 stages",
                368: "one way",
                768: "23 borders",
                672: "goes around",
                1: "both ways",
            },
        ),
        ("held", 4, {6: "only 4 micro-batches", 8: "That is p", 5: "i counted from 0"}),
    ],
)
def test_questions_of_the_lesson(name: str, right: int, wrong: dict[int, str]) -> None:
    for answer in (right, float(right), np.int64(right)):
        assert check(f"13.{name}", answer).is_correct
    for answer, words in wrong.items():
        nudged(getattr(lab_13, name)(answer), words)


def texts(rows: Any) -> list[list[str]]:
    return [[str(action) for action in row] for row in rows]


def like_1f1b(warm_of: Callable[[int, int], int], kinds: str = "B") -> Callable[..., Any]:
    """1F1B with another warm-up, or with backwards in parts."""

    def rows(stages: int, count: int) -> list[list[str]]:
        found = []
        for rank in range(stages):
            warm, row = min(warm_of(rank, stages), count), []
            row += [f"{rank}F{k}" for k in range(warm)]
            for k in range(count):
                row += [f"{rank}F{warm + k}"] if warm + k < count else []
                row += [f"{rank}{kind}{k}" for kind in kinds]
            found.append(row)
        return found

    return rows


right_1f1b = like_1f1b(lambda rank, stages: stages - 1 - rank)


# Exercise 1


def test_1f1b_may_be_given_as_tuples() -> None:
    answer = lambda p, m: tuple(map(tuple, right_1f1b(p, m)))  # noqa: E731
    assert lab_13.one_f_one_b(answer).status is Status.CORRECT


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (like_1f1b(lambda rank, stages: rank), "earlier ranks run ahead"),
        (like_1f1b(lambda rank, stages: stages - rank), "One forward too many"),
        (lambda p, m: texts(order("gpipe", p, m)), "All forwards first is GPipe"),
        (like_1f1b(lambda rank, stages: 0), "waits for each backward"),
        (like_1f1b(lambda rank, stages: stages - 1 - rank, kinds="IW"), "whole backwards"),
        (lambda p, m: [row[:-1] for row in right_1f1b(p, m)], "never runs"),
        (lambda p, m: [[*row, row[0]] for row in right_1f1b(p, m)], "stands twice"),
        (lambda p, m: right_1f1b(p, m)[:-1], "there are 3 lists, and 4 ranks"),
        (lambda p, m: right_1f1b(p, m)[::-1], "which holds stage 0"),
        (lambda p, m: [" ".join(row) for row in right_1f1b(p, m)], "One list for each rank"),
        (lambda p, m: [[("F", 0)]] * p, 'An action is a text, such as "2F0"'),
        (lambda p, m: [["F0"]] * p, "'F0' is no action"),
        (lambda p, m: None, "returns nothing"),
    ],
)
def test_lists_that_are_not_1f1b(answer: Any, words: str) -> None:
    nudged(lab_13.one_f_one_b(answer), words)


# Exercise 2


def by_case(attribute: str, only: int | None = None) -> Callable[..., Any]:
    """Answers from the table of cases, one of them replaced."""

    def answer(rows: list[list[str]]) -> list[str | None]:
        number = next(i for i, case in enumerate(STUCK) if case.rows == rows)
        return STUCK[number].right if number != only else [attribute] * len(rows)

    return answer


def one_sweep(rows: list[list[str]]) -> list[str | None]:
    return next(case for case in STUCK if case.rows == rows).one_sweep


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (one_sweep, "may move later"),
        (by_case("0B0", only=0), "Nothing hangs here"),
        (by_case("0F0", only=2), "I gives the stage before"),
        (by_case("0B0", only=3), "1I0 gives it, as 1B0 would"),
        (by_case("0I0", only=4), "W needs the I"),
        (by_case("0F0", only=5), "by their stage"),
        (by_case("0B1", only=6), "never comes"),
        (lambda rows: [None], "One entry for each rank"),
        (lambda rows: [0] * len(rows), "not its place"),
        (lambda rows: None, "returns nothing"),
    ],
)
def test_places_that_are_wrong(answer: Any, words: str) -> None:
    nudged(lab_13.stuck(answer), words)


def test_a_detector_may_empty_the_lists_that_it_gets() -> None:
    before = copy.deepcopy([case.rows for case in STUCK])

    def eats(rows: list[list[str]]) -> list[str | None]:
        found = solved()["stuck"]([list(row) for row in rows])
        rows.clear()
        return found

    assert lab_13.stuck(eats).status is Status.CORRECT
    assert before == [case.rows for case in STUCK]


# Exercise 3


def late_weights(stages: int, count: int) -> list[list[str]]:
    """All passes to the weights at the end: nothing is ever let go."""
    rows = like_1f1b(lambda rank, p: p - 1 - rank, kinds="I")(stages, count)
    return [[*row, *(f"{rank}W{k}" for k in range(count))] for rank, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (right_1f1b, "Split B"),
        (lambda p, m: texts(order("gpipe", p, m)), "holds too many"),
        (late_weights, "run a W before the next F"),
        (like_1f1b(lambda rank, stages: rank, kinds="IW"), "Which two ranks wait"),
        (lambda p, m: [row[:-1] for row in texts(order("zb-h1", p, m))], "never runs"),
        (lambda p, m: [[]] * p, "The schedule is empty"),
    ],
)
def test_schedules_that_do_not_count(answer: Any, words: str) -> None:
    nudged(lab_13.own_schedule(answer), words)


def test_a_split_backward_alone_beats_1f1b_and_not_the_par() -> None:
    verdict = lab_13.own_schedule(like_1f1b(lambda rank, p: p - 1 - rank, kinds="IW"))
    assert verdict.status is Status.CORRECT
    found, par = (float(part.split()[0]) for part in verdict.score.split(", par "))
    assert par == sum(3 * m + p - 1 for p, m in OWN) < found


# Exercise 4


def answer_4(circle: Any, change: Callable[[list[list[str]]], Any]) -> dict[str, Any]:
    rows = [list(row) for row in BROKEN]
    return {"circle": circle, "cured": change(rows) or rows}


def with_row(rank: int, row: str) -> Callable[[list[list[str]]], Any]:
    def change(rows: list[list[str]]) -> None:
        rows[rank] = row.split()

    return change


CURE = with_row(2, "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5")
OTHER_CURE = with_row(2, "2F0 2B0 2F1 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5")
COSTLY = with_row(1, "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5")


def everything(rows: list[list[str]]) -> list[list[str]]:
    return texts(order("1f1b", 4, 6))


@pytest.mark.parametrize("circle", [[1, 2], (2, 1), {1, 2}, [np.int64(1), 2.0]])
@pytest.mark.parametrize("cure", [CURE, OTHER_CURE])
def test_right_diagnoses(circle: Any, cure: Any) -> None:
    assert lab_13.diagnosis(answer_4(circle, cure)).status is Status.CORRECT


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_4([0, 1], CURE), "Whom do those two wait for"),
        (answer_4([0, 1, 2, 3], CURE), "Whom do those two wait for"),
        (answer_4([1, 2], lambda rows: None), "The circle is still there"),
        (answer_4([1, 2], COSTLY), "at the price of memory"),
        (answer_4([1, 2], everything), "One of the two has the wrong warm-up"),
        (answer_4([1, 2], with_row(2, "2F0 2B0")), "never runs"),
        (answer_4(2, CURE), "a list of ranks"),
    ],
)
def test_wrong_diagnoses(answer: Any, words: str) -> None:
    nudged(lab_13.diagnosis(answer), words)


def test_the_lab_shows_the_broken_program() -> None:
    text = solved_lab("advanced/13_pipelines").read_text(encoding="utf-8")
    assert all(" ".join(row) in text for row in BROKEN)


# Exercise 5


def even(seconds: list[float], stages: int) -> list[int]:
    least, more = divmod(len(seconds), stages)
    return [least + (i < more) for i in range(stages)]


def greedy(seconds: list[float], stages: int) -> list[int]:
    """Fill up to the average, and leave one layer for each later stage."""
    counts, rest = [], list(seconds)
    for left in range(stages, 1, -1):
        goal, held, taken = sum(rest) / left, 0.0, 0
        while taken < len(rest) - left + 1 and (not taken or held + rest[taken] <= goal):
            held += rest[taken]
            taken += 1
        counts.append(taken)
        rest = rest[taken:]
    return [*counts, len(rest)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (even, "not the best"),
        (greedy, "not the best"),
        (lambda seconds, stages: [len(seconds)] + [0] * (stages - 1), "at least one"),
        (lambda seconds, stages: [1] * stages, "Every layer once"),
        (lambda seconds, stages: [len(seconds)], "a number for each stage"),
        (lambda seconds, stages: None, "returns nothing"),
    ],
)
def test_cuts_that_are_not_the_best(answer: Any, words: str) -> None:
    nudged(lab_13.cut_layers(answer), words)


def test_a_cut_by_search_is_accepted() -> None:
    def answer(seconds: list[float], stages: int) -> list[int]:
        low, high = 0.0, sum(seconds)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if filled(seconds, middle, stages) else (middle, high)
        return filled(seconds, high, stages)

    assert lab_13.cut_layers(answer).status is Status.CORRECT


def filled(seconds: list[float], limit: float, stages: int) -> list[int]:
    """Stages that stay below a limit, or nothing if it takes more of them."""
    counts, held = [0], 0.0
    for index, each in enumerate(seconds):
        must_open = len(seconds) - index == stages - len(counts)
        if counts[-1] and (held + each > limit or must_open):
            counts.append(0)
            held = 0.0
        held, counts[-1] = held + each, counts[-1] + 1
        if held > limit:
            return []
    return counts if len(counts) == stages else []


def test_the_optimum_is_that_of_all_cuts() -> None:
    seconds, stages = layer_problems()[1]
    cuts = [(a, b, 6 - a - b) for a in range(1, 5) for b in range(1, 6 - a)]
    times = [
        max(sum(seconds[:a]), sum(seconds[a : a + b]), sum(seconds[a + b :])) for a, b, _ in cuts
    ]
    assert best_cut(seconds, stages) == min(times)
