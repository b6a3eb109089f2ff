"""Lab 08's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import pytest
import torch
from lab_cases import answers, nudged, solved_lab, untouched_lab

from utils.labs import check
from utils.labs.lab_08 import budget_bytes, choices, greedy, sorted_gptq
from utils.labs.verdict import Status
from utils.models.bytes_llama import calibration_tokens
from utils.techniques.gptq import gptq
from utils.techniques.rounding import Grid, round_to_nearest

NAME = "intermediate/08_smaller_weights"
NAMES = {"torch": torch, "Grid": Grid, "calibration_tokens": calibration_tokens}
EXERCISES = ["largest_first", "spend_bits", "wrong_text", "served_sequences"]


def verdict(name, answer):
    return check(f"08.{name}", answer).verdict


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(exercise):
    found = verdict(exercise, answers(solved_lab(NAME), **NAMES)[exercise])
    assert found.status is Status.CORRECT, found


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise):
    untouched = answers(untouched_lab(NAME), **NAMES)
    assert verdict(exercise, untouched[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("cache_kib", 320, {2560: "share 8", 160: "leaves both", 327_680: "bytes", 7: "2 x layers"}),
        ("independent_inputs", 0, {10: "diagonal", 100: "diagonal"}),
        ("large_batch", 1, {4: "batch 1", 0: "factor of 1", 2: "Which bytes"}),
    ],
)
def test_questions_of_the_lesson(name, right, wrong):
    assert verdict(name, right).status is Status.CORRECT
    assert verdict(name, ...).status is Status.NOT_ATTEMPTED
    for answer, words in wrong.items():
        nudged(verdict(name, answer), words)


def not_put_back(weight, moments, bits):
    order = moments.diagonal().argsort(descending=True)
    return sorted_gptq(weight, moments, bits)[:, order]


def other_grid(weight, moments, bits):
    return gptq(weight, moments, bits, 16).weight()


def undamped(weight, moments, bits):
    inverse = torch.linalg.inv_ex(moments)[0]
    return weight @ inverse * torch.nan


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda w, h, b: round_to_nearest(w, b).weight(), "rounding to nearest"),
        (lambda w, h, b: gptq(w, h, b).weight(), "from left to right"),
        (not_put_back, "Put them back"),
        (other_grid, "one grid"),
        (undamped, "damping"),
        (lambda w, h, b: w, "one grid"),
        (lambda w, h, b: w.T, "weight that is stored"),
        (lambda w, h, b: None, "return"),
    ],
)
def test_wrong_ways_to_round(answer, words):
    nudged(verdict("largest_first", answer), words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda table, budget: dict.fromkeys(table, 3), "As many bits everywhere"),
        (lambda table, budget: dict.fromkeys(table, 8), "Add up"),
        (lambda table, budget: dict.fromkeys(table, 5), "2, 3, 4 or 8"),
        (lambda table, budget: {}, "There is no"),
    ],
)
def test_wrong_ways_to_spend(answer, words):
    nudged(verdict("spend_bits", answer), words)


def test_the_budget_is_kept_and_nearly_spent():
    table, budget = choices(), budget_bytes()
    spent = sum(table[path][bits][0] for path, bits in greedy(table, budget).items())
    assert 0.97 * budget < spent <= budget, "the greedy way leaves less than one step unspent"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (calibration_tokens, "still does better"),
        (lambda: torch.zeros(4, 5, dtype=torch.long), "A batch of sequences"),
        (lambda: torch.full((4, 128), 300), "0 to 255"),
        (lambda: torch.rand(4, 128), "0 to 255"),
    ],
)
def test_texts_that_break_nothing(answer, words):
    nudged(verdict("wrong_text", answer), words)


def each(layers, heads, width, context):
    return 2 * layers * heads * width * 2 * context


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda w, l, k, d, c, m: int((m - w) // (each(l, k, d, c) / 2)), "a key and a value"),
        (lambda w, l, k, d, c, m: int(m // each(l, k, d, c)), "weights lie on the card"),
        (lambda w, l, k, d, c, m: int((m - w) // each(l, k, d, c)), "not fewer"),
        (lambda w, l, k, d, c, m: max(0, -int(-(m - w) // each(l, k, d, c)) - 1), "last byte"),
    ],
)
def test_wrong_counts_of_sequences(answer, words):
    nudged(verdict("served_sequences", answer), words)
