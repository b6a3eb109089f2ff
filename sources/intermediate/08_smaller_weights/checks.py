"""Checks of lesson and lab 08, "Smaller weights for inference"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from utils.labs.cases import Case, Exercise, Question, judge, scored, takes
from utils.labs.kinds import function, instance, keys, number, one_of, several, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown

from .few_bits import (
    BITS,
    CHOICES,
    GROUP,
    Table,
    budget_bytes,
    calibrated_on,
    choices,
    held_out_perplexity,
    layer,
    layer_par,
    loss_with,
    perplexity_with,
    without_text,
)
from .gptq import gptq
from .library_text import LENGTH
from .rounding import Rounded, output_error, round_to_nearest

ENOUGH = 1.01  # times the library's error, exercise 1
NEAR = 1.005  # times the par's perplexity, exercise 2
HARM = 1.15  # times the perplexity of rounding to nearest, exercise 3
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

independent_inputs = Question(
    "Lesson 08: what GPTQ gains where inputs are independent, in percent.",
    number("a number of percent"),
    right=0,
    within=0.01,
    nudge="What does the inverse of a diagonal matrix say of the columns to come?",
    note="the inverse is diagonal too: no other column can make up for an error",
    expected="percent of error saved",
)


@takes(function())
def few_bits(answer: Callable[[Tensor, Tensor], Any]) -> Verdict:
    """Exercise 1: three bits in groups of 32, as near to the layer's output as GPTQModel."""
    weight, moments = layer()
    tensors = several(instance(Tensor, "a tensor"), 3, "codes, scales and zeros, three tensors")
    codes, scales, zeros = tensors.returned(answer(weight.clone(), moments.clone()))
    if verdict := _not_the_format(codes, scales, zeros, weight):
        return verdict
    codes, scales, zeros = (part.detach().float() for part in (codes, scales, zeros))
    stored = Rounded(codes, scales, zeros, BITS).weight()
    error, par = output_error(weight, stored, moments), layer_par()
    score = scored(error, par, "error of the output", "{:.4f}".format)
    if error > ENOUGH * par:
        return not_yet(
            "the error of the output",
            expected=f"{par:.4f}, to 1%",
            got=f"{error:.4f}",
            nudge=_error_nudge(stored, error, weight, moments),
        )
    return correct("the library's format, and no more error than the library's", score=score)


def _not_the_format(codes: Tensor, scales: Tensor, zeros: Tensor, weight: Tensor) -> Verdict | None:
    rows, groups = weight.shape[0], weight.shape[1] // GROUP
    for name, part, shape in (
        ("codes", codes, weight.shape),
        ("scales", scales, (rows, groups)),
        ("zeros", zeros, (rows, groups)),
    ):
        if tuple(part.shape) != tuple(shape):
            return not_yet(
                f"the shape of {name}",
                expected=f"{tuple(shape)}",
                got=f"{tuple(part.shape)}",
                nudge="One scale and one zero point for each group of a row.",
            )
        if not part.isfinite().all():
            nudge = "Does the Cholesky factor exist? Damping adds to the diagonal of H."
            return not_yet(name, expected="finite numbers", got="NaN or infinity", nudge=nudge)
    for name, part in (("codes", codes), ("zeros", zeros)):
        off = (part != part.round()) | (part < 0) | (part > 2**BITS - 1)
        if off.any():
            return not_yet(
                f"{int(off.sum())} of the {name}",
                expected="whole numbers from 0 to 7",
                got=f"such as {part[off][0].item():.4g}",
                nudge="Clamp after rounding; the weight itself is not a code.",
            )
    return None


def _error_nudge(stored: Tensor, error: float, weight: Tensor, moments: Tensor) -> str:
    nearest = round_to_nearest(weight, BITS, GROUP).weight()
    plain = output_error(weight, nearest, moments)
    in_order = output_error(weight, gptq(weight, moments, BITS, GROUP).weight(), moments)
    if torch.allclose(stored, nearest, atol=1e-4):
        return "That is rounding to nearest. Let the columns to come make up for each error."
    if error > 0.9:
        return "Next to nothing is left of the output. Do the columns lie in the order in which they came?"
    if error > plain:
        return (
            f"That is worse than rounding to nearest ({plain:.4f}). Is it the factor of H's inverse, sorted as the "
            "columns are? Does each code stand on its own group's grid?"
        )
    if abs(error / in_order - 1) < 0.005:
        return "That is the lesson's order, left to right. Which columns should be rounded while most others are free?"
    return (
        "Better than rounding to nearest. Are the largest moments first, and were the grids chosen "
        "before any weight moved?"
    )


def _measured_loss(table: Table) -> dict[str, dict[int, float]]:
    """The loss with one matrix alone in so many bits, by path and bits."""
    plain = loss_with({})  # in 4 or 8 bits one matrix moves it too little to change a choice
    return {
        path: {2: loss_with({path: 2}), 3: loss_with({path: 3}), 4: plain, 8: plain}
        for path in table
    }


def by_harm(
    table: Table, budget: float, losses: Mapping[str, Mapping[int, float]]
) -> dict[str, int]:
    """The par's way: from the fewest bits, buy where a byte takes off the most of the loss."""
    bits = dict.fromkeys(table, CHOICES[0])
    spent = sum(row[CHOICES[0]][0] for row in table.values())
    while True:
        offers = []
        for path, now in bits.items():
            for more in CHOICES[CHOICES.index(now) + 1 :]:
                price = table[path][more][0] - table[path][now][0]
                if spent + price <= budget:
                    gain = losses[path][now] - losses[path][more]
                    offers.append((gain / price, path, more, price))
        if not offers:
            return bits
        _, path, more, price = max(offers)
        bits[path], spent = more, spent + price


@functools.cache
def spending_par() -> float:
    """The perplexity that `by_harm` reaches."""
    table = choices()
    return perplexity_with(by_harm(table, budget_bytes(), _measured_loss(table)))


@takes(function())
def spend_bits(answer: Callable[[Table, float], Any]) -> Verdict:
    """Exercise 2: bits for each layer under a budget, scored by perplexity."""
    table, budget = choices(), budget_bytes()
    found = instance(Mapping, "a dict of bits by path").returned(answer(choices(), budget))
    if missing := [path for path in table if path not in found]:
        return not_yet(
            "a layer has no bits",
            expected=f"{len(table)} paths",
            got=f"{len(found)}",
            nudge=f"There is no {missing[0]!r} in it.",
        )
    wrong = [path for path in found if path not in table or found[path] not in CHOICES]
    if wrong:
        return not_yet(
            f"the bits of {wrong[0]!r}",
            expected="2, 3, 4 or 8",
            got=shown(found[wrong[0]]),
            nudge="The table has four choices for each path, and no other paths.",
        )
    bits = {path: int(found[path]) for path in table}
    spent = sum(table[path][count][0] for path, count in bits.items())
    if spent > budget:
        return not_yet(
            "the bytes of all layers",
            expected=f"{budget:,.0f} or fewer",
            got=f"{spent:,.0f}",
            nudge="Add up table[path][bits][0] before you buy more.",
        )
    return _judged(bits, spent, budget)


def _judged(bits: dict[str, int], spent: float, budget: float) -> Verdict:
    mine, par = perplexity_with(bits), spending_par()
    if mine <= NEAR * par:
        return correct(
            "bits where they count", score=scored(mine, par, "perplexity", "{:.4f}".format)
        )
    if len(set(bits.values())) == 1:
        nudge = "The same bits everywhere. Which matrices are hurt most by 2 bits?"
    elif spent < 0.95 * budget:
        nudge = (
            f"{budget - spent:,.0f} bytes of the budget are left. Go on buying while a step fits."
        )
    else:
        nudge = (
            "The bytes went to matrices that need them less. An output's own error is not its harm to the model: "
            "loss_with({path: 2}) measures that."
        )
    return not_yet(
        "perplexity", expected=f"{NEAR * par:.4f} or less", got=f"{mine:.4f}", nudge=nudge
    )


@takes(function())
def wrong_text(answer: Callable[[], Any]) -> Verdict:
    """Exercise 3: a calibration text with which GPTQ does worse than rounding to nearest."""
    tokens = instance(Tensor, "a tensor of tokens").returned(answer())
    if tokens.dim() != 2 or tokens.shape[1] != LENGTH or not 1 <= len(tokens) <= 64:
        return not_yet(
            "the shape",
            expected=f"(1 to 64, {LENGTH})",
            got=str(tuple(tokens.shape)),
            nudge="A batch of sequences, as calibration_tokens() gives.",
        )
    if tokens.dtype not in WHOLE or int(tokens.min()) < 0 or int(tokens.max()) > 255:
        return not_yet(
            "the tokens",
            expected="whole numbers from 0 to 255",
            got="others",
            nudge="The model reads bytes: torch.randint(...), or the bytes of a text.",
        )
    mine, without = held_out_perplexity(calibrated_on(tokens.long())), without_text()
    if mine < HARM * without:
        nudge = (
            "Worse than no text, and not bad enough: a text of few different bytes leaves most weights alone. "
            "Which asks for many, and for the wrong ones?"
            if mine > without
            else "GPTQ still does better than no text at all. Is your text one that the model knows, or nearly empty?"
        )
        return not_yet(
            "perplexity with your text",
            expected=f"{HARM * without:.3f} or more; rounding to nearest gives {without:.3f}",
            got=f"{mine:.3f}",
            nudge=nudge,
        )
    return correct(
        "GPTQ fitted the model to a text that nobody reads",
        score=f"perplexity {mine:.2f}, from {without:.2f} by rounding to nearest",
    )


@takes(
    keys(
        {
            "same kind shows it": one_of("yes", "no"),
            "what shows it": one_of(
                "more of the same text", "the layers' weights", "text that the model will read"
            ),
        }
    )
)
def diagnosis(answer: dict[str, str]) -> Verdict:
    """Exercise 3: what tells that the calibration text was wrong."""
    return (
        judge(
            answer["same kind shows it"],
            "no",
            "another text of the same kind",
            expected="yes or no",
            nudge="GPTQ fitted the layers to this kind of text. Will they do badly on it?",
        )
        or judge(
            answer["what shows it"],
            "text that the model will read",
            "what shows the damage",
            expected="one of the three",
            wrong={
                "the layers' weights": "Weights lie farther from where they were in every GPTQ, also in a good one."
            },
            nudge="Whom does the damage hurt?",
        )
        or correct("the error counts on the inputs that will come, and on no others")
    )


def _admitted_case(
    card: int, lengths: list[int], right: int, says: str, block: int = 16, **nudges: Any
) -> Case:
    return Case((card, 1_000_000, 100, lengths, block), right, says, **nudges)


_PAGE = 1600  # bytes of a block of 16 tokens in the cases
admitted = Exercise(
    "Exercise 4: how many sequences a card takes in at a time.",
    cases=[
        _admitted_case(
            1_000_000 + 10 * _PAGE,
            [16, 32, 48, 100, 16],
            3,
            "three of five sequences fit",
            wrong={4: "None is passed over: the fourth does not fit, and it ends the count."},
        ),
        _admitted_case(
            1_000_000 + 11 * _PAGE,
            [17, 17, 17, 17, 17, 17],
            5,
            "17 tokens each, in blocks of 16",
            wrong={6: "17 tokens take two blocks of 16.", 9: "17 tokens take two blocks of 16."},
        ),
        _admitted_case(
            1_000_000 + 4 * _PAGE,
            [1000, 16],
            0,
            "the first is too long for the card",
            wrong={1: "None is passed over: the first ends the count."},
        ),
        _admitted_case(
            900_000,
            [16, 16],
            0,
            "a card that the weights do not fit on",
            nudge="Where not even the weights fit, no sequence is taken in.",
        ),
        _admitted_case(
            1_000_000 + 4 * _PAGE,
            [32, 32, 16],
            2,
            "a card that two sequences fill to the last byte",
            nudge="Two sequences fill the card to the last byte, and so they fit.",
        ),
        _admitted_case(
            1_000_000 + 5 * _PAGE - 1,
            [32, 32, 16],
            2,
            "a byte too little for the third",
            nudge="A block that misses a byte is no block: round the card's blocks down.",
        ),
        _admitted_case(
            1_000_000 + 9 * _PAGE,
            [16, 16],
            2,
            "room for more than wait",
            nudge="No more can be taken in than wait.",
        ),
        _admitted_case(
            1_000_000 + 5 * 100,
            [2, 3, 1],
            2,
            "blocks of one token",
            block=1,
            nudge="The block is an argument: here it is one token.",
        ),
        _admitted_case(
            1_000_000, [], 0, "nobody waits", nudge="An empty list has no sequence to take in."
        ),
    ],
    returns=whole("a number of sequences"),
    nudge="Count blocks: the card's beside the weights, rounded down, less each sequence's, rounded up.",
    note="weights once, whole blocks for every sequence, in the order in which they came",
)
