"""Answers to the exercises of lab 12 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.labs.mistakes import KnownAnswers

known = KnownAnswers()
known.mistakes("other_way", three=(3, "What is the third"), seven=(7, "before GELU"))
known.mistakes("mb_per_layer", five=(5, "make a stream"))


def kept(
    divided: bool = False,
    copies: bool = True,
    inputs: str = "",
    stream: str = "",
    all_heads: bool = False,
) -> Callable[..., float]:
    def kept_bytes(s: int, b: int, h: int, a: int, k: int, f: int, t: int, split: str) -> float:
        share = lambda which: t if split != "no" and (stream != "whole") else 1  # noqa: E731
        if divided:
            return kept()(s, b, h, a, k, f, 1, "no") / t
        own = max(1, k / t) if copies else k / t
        own = max(1, a / t) if all_heads else own
        column = t if split == (inputs or "parts") or (inputs == "both" and split != "no") else 1
        return (
            s
            * b
            * (4 * h / share(0) + 4 * h / column + 4 * own * (h // a) + (4 * h + 4 * a + 6 * f) / t)
        )

    return kept_bytes


known.mistakes(
    "kept_bytes",
    all_divided=(kept(divided=True), "every rank hold whole"),
    heads_in_parts=(kept(copies=False), "does not fall apart"),
    inputs_divided=(kept(inputs="both"), "kept gathered are whole"),
    stream_whole=(kept(stream="whole", inputs="none"), "between pairs of matrices is divided"),
    all_heads=(kept(all_heads=True), "K heads here"),
    numbers=(lambda *given: kept()(*given) / 2, "counts numbers"),
    not_finite=(lambda *given: math.nan, "no finite number"),
    a_constant=(lambda *given: 7, "row by row"),
    no_return=(lambda *given: None, "`return`"),
)
known.rights("kept_bytes", of_numpy=lambda *given: np.float64(kept()(*given)))


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


known.mistakes(
    "row_parallel",
    one_term=(layer(one_term=True), "own term of the sum"),
    bias_each=(layer(bias_each=True), "once for each rank"),
    mean=(layer(mean=True), "That is the mean"),
    turned=(layer(turned=True), "the first dimension"),
    bias_part=(layer(bias_part=True), "Who has the rest"),
    bias_twice=(layer(bias_twice=True), "as many times too large"),
    weight_part=(layer(weight_part=True), "whose output went to other ranks"),
    no_weight=(layer(no_weight=True), "weight has no gradient"),
    all_reduce=(layer(all_reduce=True), "more is sent than needed"),
    gathers=(layer(gathers=True), "the output stays split"),
    keeps=(layer(keeps=True), "more is kept for backward"),
    no_return=(lambda x, weight, bias: None, "is to return a tensor"),
    whole_output=(lambda x, weight, bias: F.linear(x, weight, bias), "the output's shape"),
    another_width=(lambda x, weight, bias: x[:2, :, :12] * weight.sum(), "output's shape"),
    raises=(lambda x, weight, bias: dist.all_gather_into_tensor(x, x), "raised"),
)
# The bias's gradient, 12 numbers of eight bytes, summed over 4 ranks by itself: 2 x 3/4 x 96 bytes more.
known.right("row_parallel", "3,600 bytes over a ring, par 3,456")(layer(bias_reduced=True))


def digits(where: str, step: int, tp: int, dp: int, sequence: bool, **wrong: bool) -> int:
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


def fresh_in_every_call() -> Callable[..., int]:
    calls, seen = itertools.count(10**6), dict[Any, int]()

    def dropout_seed(where: str, step: int, tp: int, dp: int, sequence: bool) -> int:
        is_alike = where == "stream" and not sequence
        key = (where, step, dp) if is_alike else (where, step, tp, dp, next(calls))
        return seen.setdefault(key, next(calls))

    return dropout_seed


def hashed(by: Callable[[str], Any]) -> Callable[..., int]:
    """Python's hash of what a seed hangs on; of a text it differs from process to process."""

    def dropout_seed(where: str, step: int, tp: int, dp: int, sequence: bool) -> int:
        tp = tp if where == "scores" or sequence else 0
        return hash((by(where), step, tp, dp)) % 2**62

    return dropout_seed


known.mistakes(
    "dropout_seed",
    scores_alike=(lambda *given: digits(*given, scores_alike=True), "drop the same scores"),
    stream_alike=(lambda *given: digits(*given, stream_alike=True), "repeat along the sequence"),
    never_alike=(lambda *given: digits(*given, never_alike=True), "the copies part"),
    no_data_rank=(lambda *given: digits(*given, no_dp=True), "Data-parallel ranks"),
    sums=(
        lambda where, step, tp, dp, sequence: (
            10**6 * (where == "stream")
            + 1000 * dp
            + step
            + (tp if where == "scores" or sequence else 0)
        ),
        "Sums of small numbers",
    ),
    negative=(lambda *given: -1 - digits(*given), "from 0 to 2^63 - 1"),
    half=(lambda *given: 0.5, "whole number"),
    no_return=(lambda *given: None, "`return`"),
    one_kind=(
        lambda where, step, tp, dp, sequence: digits(
            "scores" if sequence else where, step, tp, dp, sequence, one_kind=sequence
        ),
        "Scores and stream draw",
    ),
    fresh_in_every_call=(fresh_in_every_call(), "two calls alike"),
    salted=(hashed(str), "another in every process"),
)
known.rights(
    "dropout_seed",
    hash_of_numbers=hashed(lambda where: where == "scores"),  # whole numbers have no salt
    of_numpy=lambda *given: np.int64(digits(*given)),
)
known.mistakes(
    "diagnosis",
    none_in_a=({"run A": "none"}, "where backward begins, and where it ends"),
    scores_in_b=({"run B": "dropout of scores alike on all ranks"}, "Forward has parted already"),
    none_in_c=({"run C": "none"}, "eight heads"),
    earlier_in_a=({"where in run A": "feed-forward of block 0"}, "Its own weights still"),
)
