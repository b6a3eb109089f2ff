"""Checks of lesson and lab 03, "When numbers break"."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from utils.labs.cases import Question, judge, takes
from utils.labs.checkpoint_probe import backward
from utils.labs.faulty_runs import FAULTS, fault_of, run, spoiled_run
from utils.labs.kinds import (
    NO_RETURN,
    NotYet,
    function,
    keys,
    number,
    one_of,
    or_none,
    same_float,
    several,
    whole,
)
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.techniques.numerics_recorder import StepRecord

from .number_formats import FORMATS, NumberFormat
from .scaler import clipped_step, loss_scaler  # noqa: F401

counter_stops = Question(
    "Lesson 03: counting by one in fp16.",
    number("a number, where n + 1 is n,"),
    right=2048,
    wrong={
        1024: "At 1,024 the step is 1: one more still counts.",
        2047: "2,047 + 1 = 2,048 can be held. And then?",
        65504: "That is the largest number. Digits run out long before range.",
    },
    nudge="At which number is the step larger than 1?",
    note="2,048 + 1 lies between two neighbours and goes back to the even one",
)

bet = Question(
    "Lesson 03: one NaN in a batch of an fp16 run with a loss scaler.",
    one_of("lives", "dies"),
    right="lives",
    wrong={
        "dies": "It is not what happened: look at the fp16 line. What did the scaler do at step 17?"
    },
    nudge="Did the training loss become NaN for good?",
    note="the scaler took the NaN for an overflow, and skipped the step",
)

_SEVEN = "2^17 itself works: count the scales above it."
skipped_steps = Question(
    "Lesson 03: halvings from 2^24 to 2^17.",
    number("a number of steps"),
    right=7,
    wrong={6: _SEVEN, 8: _SEVEN},
    nudge="Each skip halves the scale. How many halvings from 2^24 to 2^17?",
    note="2^24, ..., 2^18 are skipped: seven halvings, and 2^17 works",
)


@takes(function())
def decode_float(answer: Callable[[str, int, int], float]) -> Verdict:
    """Exercise 1: every pattern of three splits, one of them unknown to textbooks."""
    for form in (FORMATS["fp8 e5m2"], NumberFormat("a 3-2 split", 3, 2), FORMATS["bf16"]):
        step = 1 if form.bits < 10 else 251
        minus_zero = 2 ** (form.bits - 1)  # comes last: whoever forgets the sign fails elsewhere
        patterns = {*range(0, 2**form.bits, step), minus_zero}
        for pattern in sorted(patterns, key=lambda pattern: (pattern == minus_zero, pattern)):
            bits = f"{pattern:0{form.bits}b}"
            right = form.decode(bits)
            found = number().returned(answer(bits, form.exponent_bits, form.mantissa_bits))
            if not same_float(found, right):
                nudge = _bits_nudge(form, bits, found, right)
                return not_yet(f"{bits} in {form.name}", expected=right, got=found, nudge=nudge)
    return correct("normal and subnormal numbers, both zeros, infinities and NaN, in three splits")


def _bits_nudge(form: NumberFormat, bits: str, found: float, right: float) -> str:
    if found == right == 0:
        return "Zero has a sign, too: -0.0 is a float of its own. Multiply by the sign at the end."
    if found == -right:
        return "The size is right. What is the first bit for?"
    exponent = bits[1 : 1 + form.exponent_bits]
    if "1" not in exponent:
        return (
            "The exponent is all zeros: a subnormal number has no leading 1, and exponent 1 - bias."
        )
    if "0" not in exponent:
        return "The exponent is all ones: infinity if the mantissa is zero, else NaN."
    return "A normal number: is the bias 2^(exponent bits - 1) - 1, and is the leading 1 there?"


class _Square(nn.Module):
    """Squares, with a weight: what overflows in fp16 above 255."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * x)


@takes(function("a class"))
def in_fp32(answer: Callable[[nn.Module], Any]) -> Verdict:
    """Exercise 4: a layer that overflows in fp16, and one that autocast would cast down."""
    product = nn.Linear(4, 4, bias=False)
    nn.init.constant_(product.weight, 100.0)
    low = torch.full((2, 4), 300.0, dtype=torch.float16)
    for layer, says, nudge in [
        (_Square(), "a layer that squares", "Its input is still fp16. What lifts a tensor?"),
        (
            product,
            "a linear layer",
            "Autocast casts products down again. It can be switched off around them.",
        ),
    ]:
        plain, lifted = copy.deepcopy(layer), _made(answer, layer)
        if not isinstance(lifted, nn.Module):
            return not_yet(
                "an nn.Module is wanted", got=shown(lifted), nudge="Derive it from nn.Module."
            )
        if [id(p) for p in lifted.parameters()] != [id(p) for p in layer.parameters()]:
            hint = (
                "Keep the layer as an attribute of the module: then PyTorch finds its parameters."
            )
            return not_yet(f"{says}: its parameters are not the module's", nudge=hint)
        with torch.autocast("cpu", dtype=torch.float16):
            found, after = lifted(low), torch.is_autocast_enabled("cpu")
        if not isinstance(found, torch.Tensor):
            return not_yet(f"{says}: a tensor is wanted", got=shown(found), nudge=NO_RETURN)
        if problem := _layer_changed(layer):
            return not_yet(
                f"{says}: its own parameters are in {problem} now",
                nudge=".double() and .half() change the layer itself. It is fp32 already.",
            )
        right = plain(low.float())
        if found.dtype != torch.float32 or not torch.equal(found, right):
            return not_yet(
                f"{says}, input 300 in fp16",
                expected=f"{right[0, 0].item():.0f} in torch.float32",
                got=f"{found.flatten()[0].item()} in {found.dtype}",
                nudge=nudge,
            )
        if problem := _not_trained(found, layer, right, plain):
            return not_yet(
                f"{says}: {problem}",
                nudge="Nothing in it is for evaluation alone: no torch.no_grad(), no detach().",
            )
        if not after:
            return not_yet(
                "autocast is off afterwards", nudge="A `with` switches it on again at its end."
            )
    return correct("lifted, computed in fp32, and autocast is on again afterwards")


def _made(answer: Callable[[nn.Module], Any], layer: nn.Module) -> Any:
    try:
        return answer(layer)
    except TypeError:
        is_module = isinstance(answer, type) and issubclass(answer, nn.Module)
        if not is_module or "__init__" in vars(answer):
            raise
        nudge = (
            "Write `def __init__(self, layer):`, call super().__init__() in it, and keep the layer."
        )
        raise NotYet(not_yet("your class does not take a layer", nudge=nudge)) from None


def _layer_changed(layer: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in layer.parameters() if p.dtype != torch.float32), None)


def _not_trained(
    found: torch.Tensor, layer: nn.Module, right: torch.Tensor, plain: nn.Module
) -> str:
    """What is wrong with the gradients of a lifted layer; empty if they are the plain layer's."""
    if not found.requires_grad:
        return "its result carries no gradient, so it would never be trained"
    backward(found.sum())
    right.sum().backward()
    for mine, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
        if mine.grad is None or wanted.grad is None or not torch.allclose(mine.grad, wanted.grad):
            return "its parameters do not get the gradients of a plain layer"
    return ""


@cache
def _runs() -> list[tuple[str, list[StepRecord], tuple[int, int] | None]]:
    """What each run of exercise 5 is, its records, and its first bad input."""
    return [
        ("a run with a NaN at step 9, row 13", spoiled_run(9, 13), (9, 13)),
        ("a run with a NaN at step 5, row 30", spoiled_run(5, 30), (5, 30)),
        ("a run with 1e30 at step 7, row 20", run(spoil=(7, 20), value=1e30), (7, 20)),
        ("a run whose data are fine, and whose scale searches", run(init_scale=2.0**22), None),
        (
            "a run with a NaN at step 5, row 30, and another at step 9, row 13",
            [*spoiled_run(5, 30)[:8], *spoiled_run(9, 13)[8:]],
            (5, 30),
        ),
        ("a run that diverges, with a NaN at step 9, row 13", run(lr=1e5, spoil=(9, 13)), (9, 13)),
    ]


_PLACE = or_none(
    several(whole(), 2, "a tuple of two numbers (record.step, the first of record.first.rows)")
)


@takes(function())
def find_bad_data(answer: Callable[[list[StepRecord]], Any]) -> Verdict:
    """Exercise 5: the lab's run, others, and ones that skip or diverge on data that are fine."""
    for says, records, right in _runs():
        found, has_rows = _first_row(answer(list(records)))
        place = _PLACE.returned(found)
        if verdict := judge(place, right, says, nudge=_data_nudge(place, records)):
            return verdict
        if has_rows:
            return not_yet(
                says, expected=right, nudge="`rows` is a tuple: its first entry is the row."
            )
    return correct("step and row of the sample, and no false alarm")


def _first_row(found: Any) -> tuple[Any, bool]:
    """The answer with the first of its rows, and whether it had all of them in a tuple."""
    is_pair = isinstance(found, (tuple, list)) and len(found) == 2
    if is_pair and isinstance(found[1], tuple) and found[1]:
        return (found[0], found[1][0]), True
    return found, False


def _is_bad_input(record: StepRecord) -> bool:
    return record.first is not None and record.first.kind == "input"


def _data_nudge(found: tuple[int, int] | None, records: list[StepRecord]) -> str:
    if found is None:
        return "Is there a `return` on every path? Which kind does a bad input have?"
    record = next((record for record in records if record.step == found[0]), None)
    if record is None or record.first is None:
        return "Nothing was infinite or NaN in that step: its `first` is None."
    if record.first.kind == "input" and any(_is_bad_input(r) for r in records if r.step < found[0]):
        return "Two inputs are bad here, and the first of them is wanted."
    if record.first.kind == "input":
        return "The step is right. Is the row the first of `record.first.rows`?"
    if not math.isfinite(record.loss):
        return (
            f"A loss that is NaN is no proof: what was NaN or infinite first in step {record.step} "
            f"has the kind {record.first.kind!r}, not 'input'."
        )
    return (
        "That step was skipped because the scale was too large, for no fault of the data: "
        f"its kind is {record.first.kind!r}."
    )


_EVIDENCE = {
    "no unscale": "no tensor is infinite or NaN, and the two norms differ by the scale",
    "norm in fp16": "the first bad tensor is the gradient of the norm, and fp32 trains",
    "loss overflows": "the first bad thing is the loss, every module before it is finite, fp32 trains",
    "learning rate": "the loss rises before anything breaks, and the fp32 twin explodes",
    "NaN in the data": "the first bad tensor is an input, and the fp32 twin has it at the same step",
}


@takes(keys(dict.fromkeys("ABCDE", one_of(*FAULTS, what="one of FAULTS"))))
def diagnosis(answer: dict[str, str]) -> Verdict:
    """Exercise 6: the fault of each mystery run."""
    wrong = [name for name in answer if answer[name] != fault_of(name)]
    if wrong:
        name = wrong[0]
        nudge = f"With {answer[name]!r} you would see: {_EVIDENCE[answer[name]]}. Do you, in run {name}?"
        return not_yet(f"{5 - len(wrong)} of 5 are right; look at run {name} again", nudge=nudge)
    return correct("; ".join(f"{name}: {_EVIDENCE[fault_of(name)]}" for name in "ABCDE"))
