"""Checks of lesson and lab 08, "Smaller weights for inference"."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from utils.labs.cases import Case, Exercise, Question, scored, takes
from utils.labs.kinds import function, instance, keys, number, whole
from utils.labs.verdict import Verdict, correct, not_yet
from utils.models.bytes_llama import LENGTH, bytes_llama, calibration_tokens, perplexity
from utils.techniques.gptq import gptq
from utils.techniques.rounding import Grid, output_error, round_to_nearest, second_moments
from utils.techniques.weight_only import inputs_of, linears_of, quantize_weights

GROUP = 32
CHOICES = (2, 3, 4, 8)  # bits that exercise 2 may give to a layer
BITS_A_WEIGHT = 3.6  # what exercise 2 may spend on average, scales and zero points included
MARGIN = 1.03  # how much worse than the reference an error may be, for other orders of arithmetic

cache_kib = Question(
    "Lesson 08: the cache of one token of Llama-2-70B, in KiB.",
    number("a number of KiB"), right=320, within=1,
    wrong={2560: "That is one key and value for each of 64 query heads. They share 8.",
           160: "Keys, or values. A token leaves both.",
           327_680: "Those are bytes. A KiB has 1,024.",
           4: "That is one layer. There are 80.", 640: "A number takes 2 bytes here, not 4."},
    nudge="2 x layers x key-value heads x head width numbers of 2 bytes: 80 layers, 8 heads of 128.",
    note="2 x 80 x 8 x 128 x 2 bytes",
)  # fmt: skip

independent_inputs = Question(
    "Lesson 08: what GPTQ gains where inputs are independent, in percent.",
    number("a number of percent"), right=0, within=0.01,
    nudge="What does the inverse of a diagonal matrix say of the columns to come?",
    note="the inverse is diagonal too: no other column can make up for an error",
    expected="percent of error saved",
)  # fmt: skip

large_batch = Question(
    "Lesson 08: what 4-bit weights gain where the cache is all that is read.",
    number("a factor"), right=1, within=0.05,
    wrong={4: "That holds at batch 1, where weights are all that is read. What is read here?",
           0: "Nothing gained is a factor of 1."},
    nudge="Which bytes became fewer, and which are read?",
    note="the cache is as large as before",
    expected="the ratio of tokens per second",
)  # fmt: skip


@functools.cache
def _layer() -> tuple[Tensor, Tensor]:
    """A weight of the lesson's model, one of its inputs dead, and the moments of its inputs."""
    model = bytes_llama()
    layers = {"down": model.blocks.get_submodule("2").get_submodule("feedforward.down")}
    with inputs_of(linears_of(nn.ModuleDict(layers))) as seen, torch.no_grad():
        model(calibration_tokens(seed=7))
    moments = seen["down"].moments.clone()
    moments[5], moments[:, 5] = 0, 0
    weight = linears_of(nn.ModuleDict(layers))["down"].weight.detach().clone()
    return weight, moments


def sorted_gptq(weight: Tensor, moments: Tensor, bits: int) -> Tensor:
    """What exercise 1 asks for: one grid a row, the columns with the largest moments first."""
    order = moments.diagonal().argsort(descending=True)
    moving, stored = weight[:, order].clone(), torch.empty_like(weight)
    grid = Grid.of(weight, bits)
    damped = moments[order][:, order].double()
    damped += 0.01 * damped.diagonal().mean() * torch.eye(len(damped))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    for place, column in enumerate(order.tolist()):
        stored[:, column] = grid.weight(grid.codes(moving[:, place : place + 1])).squeeze(1)
        error = (moving[:, place] - stored[:, column]) / factor[place, place]
        moving[:, place + 1 :] -= torch.outer(error, factor[place, place + 1 :])
    return stored


@takes(function())
def largest_first(answer: Callable[[Tensor, Tensor, int], Any]) -> Verdict:
    """Exercise 1: GPTQ that rounds the columns with the largest moments first."""
    weight, moments = _layer()
    tensors = instance(Tensor, "a tensor")
    scores = []
    for bits in (4, 3):
        found = tensors.returned(answer(weight.clone(), moments.clone(), bits))
        if verdict := _not_on_the_grid(found, weight, bits) or _too_far(found, weight, moments, bits):
            return verdict
        scores.append(output_error(weight, found.float(), moments))
    par = output_error(weight, sorted_gptq(weight, moments, 3), moments)
    return correct(
        "the columns that matter most are rounded while all others can still make up for them",
        score=scored(scores[1], par, "error at 3 bits", "{:.4f}".format),
    )


def _not_on_the_grid(found: Tensor, weight: Tensor, bits: int) -> Verdict | None:
    if found.shape != weight.shape:
        return not_yet(f"the shape at {bits} bits", expected=f"{tuple(weight.shape)}",
                       got=f"{tuple(found.shape)}", nudge="Give the weight that is stored.")  # fmt: skip
    if not found.isfinite().all():
        nudge = "An input never came: its moment is 0, and H has no inverse. What does damping add?"
        return not_yet(f"values at {bits} bits", expected="finite numbers", got="NaN", nudge=nudge)
    grid = Grid.of(weight, bits)
    off = (grid.weight(grid.codes(found.float())) - found.float()).abs() > 1e-4 * grid.scales
    if off.any():
        nudge = (
            "Each row has one grid: Grid.of(weight, bits), of the weight as it came. Every value is "
            "one of its places: grid.weight(grid.codes(column))."
        )
        return not_yet(f"{int(off.sum())} values at {bits} bits", expected="values of the row's grid",
                       got="others", nudge=nudge)  # fmt: skip
    return None


def _too_far(found: Tensor, weight: Tensor, moments: Tensor, bits: int) -> Verdict | None:
    """The verdict on an error that is larger than the reference's; None if it is not."""
    error = output_error(weight, found.float(), moments)
    best = output_error(weight, sorted_gptq(weight, moments, bits), moments)
    if error <= best * MARGIN:
        return None
    plain = round_to_nearest(weight, bits).weight()
    in_order = gptq(weight, moments, bits).weight()
    if torch.allclose(found.float(), plain, atol=1e-5):
        nudge = "That is rounding to nearest. Which columns make up for the error of the first?"
    elif torch.allclose(found.float(), in_order, atol=1e-5):
        nudge = "That is GPTQ from left to right. Sort by the diagonal of H, largest first."
    elif error > 0.9:
        nudge = "The columns seem to lie in another order than they came in. Put them back."
    elif error > output_error(weight, plain, moments):
        nudge = "This is worse than rounding to nearest. Is it the factor of H's *inverse*, and H sorted too?"
    else:
        nudge = "Better than nothing. Are weight, H and result all in the same order, largest first?"
    return not_yet(f"the error at {bits} bits", expected=f"{best:.4f} or less", got=f"{error:.4f}", nudge=nudge)


@functools.cache
def choices() -> dict[str, dict[int, tuple[float, float]]]:
    """For exercise 2: bytes and relative error of each layer at each number of bits."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for bits in CHOICES:
        rows = quantize_weights(bytes_llama(), calibration_tokens(), bits=bits, group=GROUP)
        for row in rows:
            found.setdefault(row.layer, {})[bits] = (row.stored_bytes, row.relative_error)
    return found


def budget_bytes() -> float:
    """What exercise 2 may spend on all matrices."""
    model = bytes_llama()
    return BITS_A_WEIGHT / 8 * sum(l.weight.numel() for l in linears_of(model.blocks).values())


def greedy(table: dict[str, dict[int, tuple[float, float]]], budget: float) -> dict[str, int]:
    """The solution's way: from the fewest bits, buy where a byte takes off the most squared error."""
    bits = dict.fromkeys(table, CHOICES[0])
    spent = sum(table[path][CHOICES[0]][0] for path in table)
    while True:
        offers = []
        for path, now in bits.items():
            for more in CHOICES[CHOICES.index(now) + 1 :]:
                price = table[path][more][0] - table[path][now][0]
                gain = table[path][now][1] ** 2 - table[path][more][1] ** 2
                if spent + price <= budget:
                    offers.append((gain / price, path, more, price))
        if not offers:
            return bits
        _, path, more, price = max(offers)
        bits[path], spent = more, spent + price


@functools.cache
def _perplexity_of(bits: tuple[tuple[str, int], ...]) -> float:
    model = bytes_llama()
    quantize_weights(model, calibration_tokens(), bits=dict(bits), group=GROUP)
    return perplexity(model)


@takes(function())
def spend_bits(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: bits for each layer under a budget, scored by perplexity."""
    table, budget = choices(), budget_bytes()
    sheet = keys({path: whole("bits: 2, 3, 4 or 8") for path in table})
    found = sheet.returned(answer(copy.deepcopy(table), budget))
    for path, bits in found.items():
        if bits not in CHOICES:
            return not_yet(f"bits of {path}", expected="2, 3, 4 or 8", got=str(bits),
                           nudge="The table has a row for each number of bits that may be taken.")  # fmt: skip
    spent = sum(table[path][bits][0] for path, bits in found.items())
    if spent > budget:
        return not_yet("the bytes of all layers", expected=f"{budget:,.0f} or fewer", got=f"{spent:,.0f}",
                       nudge="Add up table[path][bits][0] before you buy more.")  # fmt: skip
    return _judged(found, table, budget)


def _judged(found: dict[str, int], table: dict, budget: float) -> Verdict:
    mine = _perplexity_of(tuple(found.items()))
    uniform = max(b for b in CHOICES if sum(row[b][0] for row in table.values()) <= budget)
    same = _perplexity_of(tuple(dict.fromkeys(table, uniform).items()))
    if mine >= same:
        nudge = (
            "As many bits everywhere would have done as well. Which layers have the largest error, "
            "and which are small enough to get more bits cheaply?"
        )
        return not_yet("perplexity", expected=f"below {same:.4f}, that of {uniform} bits everywhere",
                       got=f"{mine:.4f}", nudge=nudge)  # fmt: skip
    par = _perplexity_of(tuple(greedy(table, budget).items()))
    return correct("bits where they count", score=scored(mine, par, "perplexity", "{:.4f}".format))


@takes(function())
def wrong_text(answer: Callable[[], Any]) -> Verdict:
    """Exercise 3: a calibration text with which GPTQ does worse than rounding to nearest."""
    tokens = instance(Tensor, "a tensor of tokens").returned(answer())
    if tokens.dim() != 2 or tokens.shape[1] != LENGTH or not 1 <= len(tokens) <= 64:
        return not_yet("the shape", expected=f"(1 to 64, {LENGTH})", got=str(tuple(tokens.shape)),
                       nudge="A batch of sequences, as calibration_tokens() gives.")  # fmt: skip
    if tokens.is_floating_point() or int(tokens.min()) < 0 or int(tokens.max()) > 255:
        return not_yet("the tokens", expected="whole numbers from 0 to 255", got="others",
                       nudge="The model reads bytes: torch.randint(...), or the bytes of a text.")  # fmt: skip
    spoilt, plain = bytes_llama(), bytes_llama()
    quantize_weights(spoilt, tokens.long(), method="gptq", bits=3, group=GROUP)
    quantize_weights(plain, calibration_tokens(), method="nearest", bits=3, group=GROUP)
    mine, without = perplexity(spoilt), perplexity(plain)
    if mine <= without:
        nudge = (
            "GPTQ still does better than no calibration at all. What text has channels that are "
            "never used, so that GPTQ believes that they do not matter?"
        )
        return not_yet("perplexity with your text", expected=f"above {without:.3f}, that of rounding to nearest",
                       got=f"{mine:.3f}", nudge=nudge)  # fmt: skip
    return correct(
        f"GPTQ fitted the model to a text that nobody reads; rounding to nearest gives {without:.3f}",
        score=f"perplexity {mine:.3f}",
    )


def _batch(name: str, given: tuple[float, ...], says: str, nudge: str = "") -> Case:
    weights, layers, kv_heads, width, context, card = given
    each = 2 * layers * kv_heads * width * 2 * context
    right = max(0, int((card - weights) // each))
    wrong = {
        int((card - weights) // (each / 2)): "A token leaves a key and a value in every layer.",
        int(card // each): "The weights lie on the card as well.",
        int((card - weights) // (each / 2)) // 2 + 1: "Round down: a part of a sequence is none.",
    }
    wrong = {value: text for value, text in wrong.items() if value != right}
    return Case(given, right, f"{name}: {says}", wrong={} if nudge else wrong, nudge=nudge)


_7B, _70B = (3.9e9, 32, 32, 128), (38.5e9, 80, 8, 128)
_EACH = 2 * 32 * 32 * 128 * 2 * 4096
served_sequences = Exercise(
    "Exercise 4: how many sequences a card serves at a time.",
    cases=[
        _batch("7B in 4 bits", (*_7B, 4096, 24e9), "4,096 tokens on 24 GB"),
        _batch("70B in 4 bits", (*_70B, 4096, 80e9), "4,096 tokens on 80 GB"),
        _batch("70B in 4 bits", (*_70B, 131_072, 80e9), "131,072 tokens on 80 GB"),
        _batch("70B in 4 bits", (*_70B, 4096, 24e9), "weights that do not fit on 24 GB",
               "Where not even the weights fit, 0 sequences are served, not fewer."),
        _batch("7B in 4 bits", (*_7B, 4096, 3.9e9 + 3 * _EACH), "a card that three sequences fill",
               "Three sequences fill the card to the last byte, and so they fit."),
    ],
    returns=whole("a number of sequences"),
    nudge="Room beside the weights, over what one sequence keeps: 2 x layers x key-value heads x width x 2 bytes a token.",
    note="weights once, a cache for every sequence",
)  # fmt: skip
