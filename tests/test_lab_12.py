"""Lab 12's checks: on the solution, the untouched lab, and wrong answers with their own nudges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab_cases import answers, nudged, solved_lab, untouched_lab
from torch import Tensor

from utils.labs import check
from utils.labs.verdict import Status
from utils.lessons.lesson_12 import checks as lab_12
from utils.lessons.lesson_12.workers import observed

LAB = "advanced/12_tensor_parallel"
NAMES = {"torch": torch, "dist": dist, "F": F, "observed": observed}
EXERCISES = ["kept_bytes", "row_parallel", "dropout_seed", "diagnosis"]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(exercise):
    found = check(f"12.{exercise}", answers(solved_lab(LAB), **NAMES)[exercise]).verdict
    assert found.status is Status.CORRECT, found
    if found.score:
        sent, par, kept, par_kept = (part.split() for part in found.score.split(", "))
        assert sent[0] == par[1] and kept[1] == par_kept[1], "the solution reaches the par"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise):
    untouched = answers(untouched_lab(LAB), **NAMES)
    assert check(f"12.{exercise}", untouched[exercise]).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("question", "right", "wrong"),
    [
        ("other_way", 2, {1: "GELU of a sum", 0: "work on a term", 3: "What is the third", 7: "before GELU"}),
        ("mb_per_layer", 268.4, {134.2: "That is half", 67.1: "one stream", 469.8: "tutorial's",
                                 536.9: "put in", 5: "make a stream"}),
    ],
)  # fmt: skip
def test_questions_of_the_lesson(question, right, wrong):
    assert check(f"12.{question}", right).is_correct
    assert check(f"12.{question}", ...).status is Status.NOT_ATTEMPTED
    for answer, words in wrong.items():
        nudged(getattr(lab_12, question)(answer), words)


# --- exercise 1 ----------------------------------------------------------------------------------


def kept(
    divided: bool = False, copies: bool = True, inputs: str = "", stream: str = "", all_heads=False
) -> Callable[..., float]:
    def kept_bytes(s, b, h, a, k, f, t, split):
        share = lambda which: t if split != "no" and (stream != "whole") else 1  # noqa: E731
        if divided:
            return kept()(s, b, h, a, k, f, 1, "no") / t
        own = max(1, k / t) if copies else k / t
        own = max(1, a / t) if all_heads else own
        column = t if split == (inputs or "parts") or (inputs == "both" and split != "no") else 1
        return s * b * (4 * h / share(0) + 4 * h / column + 4 * own * (h // a)
                        + (4 * h + 4 * a + 6 * f) / t)  # fmt: skip

    return kept_bytes


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (kept(divided=True), "every rank hold whole"),
        (kept(copies=False), "does not fall apart"),
        (kept(inputs="both"), "kept gathered are whole"),
        (kept(stream="whole", inputs="none"), "between the matrices is divided"),
        (kept(all_heads=True), "K heads here"),
        (lambda *given: kept()(*given) / 2, "counts numbers"),
        (lambda *given: math.nan, "no finite number"),
        (lambda *given: 7, "row by row"),
        (lambda *given: None, "`return`"),
    ],
)
def test_wrong_bytes_are_nudged(answer, words):
    nudged(lab_12.kept_bytes(answer), words)


def test_right_bytes_as_numpy_numbers():
    assert lab_12.kept_bytes(lambda *given: np.float64(kept()(*given))).status is Status.CORRECT


# --- exercise 2 ----------------------------------------------------------------------------------


def layer(**wrong: Any) -> Callable[..., Tensor]:
    """The solution with one thing done otherwise; all in one class, so that ranks can load it."""

    def row_parallel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()

        class Row(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                term = F.linear(x, weight, bias if wrong.get("bias_each") else None)
                part = term.new_empty(len(x) // ranks, *term.shape[1:])
                if wrong.get("all_reduce"):
                    whole = term.clone()
                    dist.all_reduce(whole)
                    part = whole.chunk(ranks)[rank].clone()
                elif wrong.get("one_term"):
                    part = term.chunk(ranks)[rank].clone()
                else:
                    dist.reduce_scatter_tensor(part, term.contiguous())
                if wrong.get("mean"):
                    part = part / ranks
                if wrong.get("keeps"):
                    ctx.term = term
                if wrong.get("gathers"):
                    dist.all_gather_into_tensor(term, part)
                return part if wrong.get("bias_each") else part + bias

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
                x, weight = ctx.saved_tensors
                whole = gradients[0].new_empty(len(x), *gradients[0].shape[1:])
                dist.all_gather_into_tensor(whole, gradients[0].contiguous())
                to_bias = whole.sum((0, 1))
                if wrong.get("bias_part"):
                    to_bias = gradients[0].sum((0, 1))
                if wrong.get("bias_twice"):
                    dist.all_reduce(to_bias)
                if wrong.get("bias_reduced"):
                    to_bias = gradients[0].sum((0, 1))
                    dist.all_reduce(to_bias)
                to_weight = whole.flatten(0, 1).T @ x.flatten(0, 1)
                if wrong.get("weight_part"):
                    own = x.chunk(ranks)[rank].flatten(0, 1)
                    to_weight = gradients[0].flatten(0, 1).T @ own
                if wrong.get("no_weight"):
                    return whole @ weight, None, to_bias
                return whole @ weight, to_weight, to_bias

        found = Row.apply(x, weight, bias)
        return found.transpose(0, 1) if wrong.get("turned") else found

    return row_parallel


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("one_term", "own term of the sum"),
        ("bias_each", "once for each rank"),
        ("mean", "That is the mean"),
        ("turned", "the first dimension"),
        ("bias_part", "Who has the rest"),
        ("bias_twice", "as many times too large"),
        ("weight_part", "whose output went to other ranks"),
        ("no_weight", "weight has no gradient"),
        ("all_reduce", "more is sent than needed"),
        ("gathers", "the output stays split"),
        ("keeps", "more is kept for backward"),
    ],
)
def test_wrong_layers_are_nudged(wrong, words):
    nudged(lab_12.row_parallel(layer(**{wrong: True})), words)


def test_a_sum_of_the_bias_by_itself_is_right_and_scores_more():
    found = lab_12.row_parallel(layer(bias_reduced=True))
    assert found.status is Status.CORRECT, found
    sent, par = (int(part.split()[place].replace(",", "")) for place, part in
                 zip((0, 1), found.score.split(", "), strict=False))  # fmt: skip
    assert sent == par + 2 * 3 * 8 * 12 // 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, weight, bias: None, "is to return a tensor"),
        (lambda x, weight, bias: F.linear(x, weight, bias), "the output's shape"),
        (lambda x, weight, bias: x[:2, :, :12] * weight.sum(), "output's shape"),
        (lambda x, weight, bias: dist.all_gather_into_tensor(x, x), "raised"),
    ],
)
def test_layers_that_are_none_are_nudged(answer, words):
    nudged(lab_12.row_parallel(answer), words)


# --- exercise 3 ----------------------------------------------------------------------------------


def digits(where, step, tp, dp, sequence, **wrong):
    alike = where == "stream" and not sequence
    place = 0 if alike else 1 + tp
    if wrong.get("scores_alike") and where == "scores":
        place = 0
    if wrong.get("stream_alike") and where == "stream":
        place = 0
    if wrong.get("never_alike"):
        place = 1 + tp
    kind = 0 if wrong.get("one_kind") else where == "stream"
    data = 0 if wrong.get("no_dp") else dp
    return ((step * 100 + data) * 100 + place) * 2 + int(kind)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *given: digits(*given, scores_alike=True), "drop the same scores"),
        (lambda *given: digits(*given, stream_alike=True), "repeat along the sequence"),
        (lambda *given: digits(*given, never_alike=True), "the copies part"),
        (lambda *given: digits(*given, no_dp=True), "Data-parallel ranks"),
        (lambda where, step, tp, dp, sequence: 10**6 * (where == "stream") + 1000 * dp + step
         + (tp if where == "scores" or sequence else 0), "Sums of small numbers"),
        (lambda *given: -1 - digits(*given), "from 0 to 2^63 - 1"),
        (lambda *given: 0.5, "whole number"),
        (lambda *given: None, "`return`"),
        (lambda where, step, tp, dp, sequence: digits("scores" if sequence else where, step, tp, dp, sequence,
                                                      one_kind=sequence), "Scores and stream draw"),
    ],
)  # fmt: skip
def test_wrong_seeds_are_nudged(answer, words):
    nudged(lab_12.dropout_seed(answer), words)


def test_seeds_that_change_from_call_to_call_are_nudged():
    calls = iter(range(10**6, 10**8))

    def fresh(where, step, tp, dp, sequence, seen={}):  # noqa: B006
        key = (
            (where, step, dp)
            if where == "stream" and not sequence
            else (where, step, tp, dp, next(calls))
        )
        return seen.setdefault(key, next(calls))

    nudged(lab_12.dropout_seed(fresh), "two calls alike")


def test_a_hash_that_is_salted_in_every_process_is_nudged():
    def hashed(where, step, tp, dp, sequence):
        tp = tp if where == "scores" or sequence else 0
        return hash((where, step, tp, dp)) % 2**62

    nudged(lab_12.dropout_seed(hashed), "another in every process")

    def by_numbers(where, step, tp, dp, sequence):
        tp = tp if where == "scores" or sequence else 0
        return hash((where == "scores", step, tp, dp)) % 2**62  # whole numbers have no salt

    assert lab_12.dropout_seed(by_numbers).status is Status.CORRECT


def test_other_right_seeds_pass():
    def by_numpy(where, step, tp, dp, sequence):
        return np.int64(digits(where, step, tp, dp, sequence))

    assert lab_12.dropout_seed(by_numpy).status is Status.CORRECT


# --- exercise 4 ----------------------------------------------------------------------------------

RIGHT = {
    "run A": "a sum missing in backward",
    "where in run A": "attention of block 1",
    "run B": "dropout of the stream differs between ranks",
    "run C": "dropout of scores alike on all ranks",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run A": "none"}, "where backward begins, and where it ends"),
        ({"run B": RIGHT["run C"]}, "Forward has parted already"),
        ({"run C": "none"}, "eight heads"),
        ({"where in run A": "feed-forward of block 0"}, "Its own weights still"),
    ],
)
def test_wrong_diagnoses_are_nudged(changes, words):
    nudged(lab_12.diagnosis(RIGHT | changes), words)


def test_the_faults_show_in_what_the_ranks_report():
    """Each by a quantity that is exact: gradients right or far off, streams equal or not, masks."""
    a, b, c = (observed(run) for run in "ABC")
    for rank in a:
        wrong = {name for name, error in rank.gradient_errors.items() if error > 1e-6}
        assert wrong, "a missing sum leaves gradients wrong"
        behind = {name for name in rank.gradient_errors if name.startswith("blocks.1.")}
        assert {n for n in wrong if n in behind} == {
            "blocks.1.attention_norm.weight", "blocks.1.attention_norm.bias",
        }  # fmt: skip
    assert len({rank.stream for rank in a}) == len({rank.stream for rank in c}) == 1
    assert len({rank.stream for rank in b}) == 4, "each rank drops other elements of one stream"
    assert len({mask for rank in b for mask in rank.masks}) == 8
    assert len({mask for rank in c for mask in rank.masks}) == 2
