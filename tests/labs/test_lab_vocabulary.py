"""The vocabulary of checks: kinds of answers, numbers compared in one place, cases as data."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from utils.labs.cases import Case, Exercise, Question, first_wrong, judge, scored, takes
from utils.labs.kinds import (
    Kind,
    NotYet,
    equal,
    flag,
    function,
    instance,
    keys,
    number,
    one_of,
    or_none,
    same_float,
    several,
    text,
    whole,
)
from utils.labs.verdict import Status, Verdict, correct, not_yet, shown

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "right", "tolerance", "is_equal"),
    [
        (12, 12, {}, True),
        (12.0, 12, {}, True),
        (np.int64(12), 12, {}, True),
        (np.float32(0.5), 0.5, {}, True),
        (Fraction(1, 2), 0.5, {}, True),
        (12.4, 12, {"within": 0.5}, True),
        (12.6, 12, {"within": 0.5}, False),
        (101, 100, {"relative": 0.01}, True),
        (102, 100, {"relative": 0.01}, False),
        (True, 1, {}, False),
        (np.True_, 1, {}, False),
        ("12", 12, {}, False),
        (None, 12, {}, False),
        (NAN, 12, {"within": INF}, False),
        (NAN, NAN, {}, False),
        (INF, INF, {"within": 1}, False),
        (-INF, 12, {"relative": 9}, False),
        (10**400, 1.5, {"within": 1}, False),
        (5, INF, {"relative": 0.1}, False),
        (INF, 5, {"within": INF}, False),
        ((1, 2.0), (1, 2), {}, True),
        ([1, 2], (1, 2), {}, True),
        ((1, NAN), (1, 2), {"within": INF}, False),
        ((1, 2, 3), (1, 2), {}, False),
        ({"b": 2, "a": 1}, {"a": 1, "b": 2}, {}, True),
        ({"a": 1}, {"a": 1, "b": 2}, {}, False),
        (False, False, {}, True),
        (0, False, {}, False),
        (torch.zeros(3), "half", {}, False),
        (torch.tensor(12), 12, {}, False),
    ],
)
def test_values_are_compared_in_one_place(
    found: Any, right: Any, tolerance: dict[str, float], is_equal: bool
) -> None:
    assert equal(found, right, **tolerance) is is_equal


def test_floats_that_are_wanted_to_the_sign_and_to_nan() -> None:
    assert same_float(NAN, NAN) and same_float(np.float32("inf"), INF) and same_float(0, 0.0)
    assert same_float(-0.0, -0.0) and same_float(1.5, 1.5)
    for found, right in [(0.0, -0.0), (-0.0, 0.0), (NAN, 1.0), (1.0, NAN), (INF, -INF), ("x", 1.0)]:
        assert not same_float(found, right), (found, right)


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (number(), np.float64(1.5), 1.5),
        (whole(), 12.0, 12),
        (whole(), np.int32(12), 12),
        (flag(), np.False_, False),
        (text(), "  Half ", "half"),
        (one_of("half", "Less"), "LESS ", "Less"),
        (or_none(whole()), None, None),
        (or_none(whole()), 3, 3),
        (several(number(), 2), [np.int64(1), 2], (1, 2)),
        (keys({"a": whole(), "b": flag()}), {"b": True, "a": 1}, {"a": 1, "b": True}),
        (instance(dict, "a dict"), {}, {}),
        (function(), len, len),
    ],
)
def test_kinds_read_what_may_be_written_in_several_ways(kind: Kind, value: Any, read: Any) -> None:
    found = kind.of(value)
    assert found == read and type(found) is type(read)
    if isinstance(read, dict):
        assert list(found) == list(read)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (number("a number of GiB"), "10", "a number of GiB is wanted"),
        (number(), True, 'got="True"'),
        (number(), torch.tensor(3.0), ".item()"),
        (whole(), 1.5, "nothing after the point"),
        (whole(), INF, "whole number"),
        (flag(), 0, "without quotes"),
        (flag(), "False", "without quotes"),
        (text(), 3, "in quotes"),
        (one_of("half", "less"), "more", '"half" or "less" is wanted'),
        (one_of("half", "less", what="an amount"), [1], 'It is "half" or "less"'),
        (function(), 42, "without calling it"),
        (several(number(), 2), (1, 2, 3), "A tuple of 2"),
        (several(number(), 2), (1, "x"), "is wanted"),
        (keys({"a": whole()}), {}, "There is no 'a'"),
        (keys({"a": whole()}), {"a": 1, "b": 2}, "'b' is not one of its keys"),
        (keys({"a": whole()}), {"a": "x"}, "a: a whole number is wanted"),
        (keys({"a": whole()}), [1], "keys that the lab shows"),
    ],
)
def test_another_kind_is_a_sentence(kind: Kind, value: Any, words: str) -> None:
    with pytest.raises(NotYet) as ending:
        kind.of(value)
    verdict = ending.value.verdict
    assert verdict.status is Status.NOT_YET
    assert words in f'{verdict.note} got="{verdict.got}" {verdict.nudge}'


def test_a_function_that_returns_nothing_is_asked_for_its_return() -> None:
    with pytest.raises(NotYet) as ending:
        number().returned(None)
    assert "returns nothing" in str(ending.value) and "`return`" in str(ending.value)


GIB = Question(
    "Lesson 97: a number of GiB.",
    number("a number of GiB"),
    right=10,
    within=0.5,
    wrong={12: "That doubles everything."},
    nudge="Which part grows?",
    note="4 become 8",
)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (12, "doubles everything"),
        (np.float32(12.2), "doubles everything"),
        (8, "Which part"),
        (NAN, "no finite number"),
        ("10", "a number of GiB is wanted"),
        ([10], "a number of GiB is wanted"),
    ],
)
def test_a_question_nudges_and_does_not_give_itself_away(answer: Any, words: str) -> None:
    verdict = GIB(answer)
    assert verdict.status is Status.NOT_YET and words in f"{verdict.note} {verdict.nudge}"
    assert "10" not in verdict.expected
    assert GIB(np.int64(10)).note == "4 become 8" and GIB.__doc__ == "Lesson 97: a number of GiB."


HALF = Exercise(
    "Exercise 1: half of a number, rounded down.",
    cases=[
        Case((8,), 4, "for 8", wrong={16: "Half, not twice."}),
        Case((7,), 3, "for 7", nudge="An odd one is rounded down."),
    ],
    returns=whole(),
    nudge="Divide by two.",
    note="both",
)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: 2 * x, "for 8 Half, not twice."),
        (lambda x: x, "Divide by two"),
        (lambda x: (x + 1) // 2, "for 7 An odd one"),
        (lambda x: x / 2, "nothing after the point"),
        (lambda x: None, "Is there a `return`"),
        (lambda x: NAN, "whole number"),
        (7, "without calling it"),
    ],
)
def test_an_exercise_is_its_cases(answer: Any, words: str) -> None:
    verdict = HALF(answer)
    assert verdict.status is Status.NOT_YET and words in f"{verdict.note} {verdict.nudge}"
    assert HALF(lambda x: np.int64(x // 2)) == correct("both")


def test_a_check_gets_the_answer_in_its_one_form() -> None:
    @takes(keys({"a": whole(), "f": function()}))
    def kept(answer: dict[str, Any]) -> Verdict:
        """Its description."""
        found = number().returned(answer["f"](answer["a"]))
        return judge(found, 2, "twice one") or correct()

    assert kept({"f": lambda x: 2 * x, "a": np.int64(1)}).status is Status.CORRECT
    assert "without calling" in kept({"f": 1, "a": 1}).nudge
    assert "`return`" in kept({"f": lambda x: None, "a": 1}).nudge
    assert kept.__doc__ == "Its description."


def test_scores_stand_beside_their_par() -> None:
    assert scored(13, 14, "calls at most") == "13 calls at most, par 14"
    assert scored(2.0, 4.0, "", form="{:.0f} B".format) == "2 B, par 4 B"


def test_first_wrong_is_none_where_all_is_right() -> None:
    assert first_wrong(lambda x: x // 2, HALF.cases) is None


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, 10**5000, Broken(), list(range(10**5))],
    ids=["text", "int", "broken", "list"],
)
def test_what_a_verdict_shows_is_short_and_never_raises(value: Any) -> None:
    verdict = not_yet(f"x{'y' * 10**6}", got=value, expected=value)
    assert all(len(part) < 500 for part in verdict.rows().values()) and len(verdict.note) < 500
    assert len(shown(value)) < 500
