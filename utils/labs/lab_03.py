"""Checks of lesson and lab 03, "When numbers break"."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from utils.labs.faulty_runs import FAULTS, fault_of, run, spoiled_run
from utils.labs.verdict import Verdict, correct, not_yet
from utils.number_formats import FORMATS, NumberFormat
from utils.techniques.flight_recorder import StepRecord


def counter_stops(answer: Any) -> Verdict:
    """Lesson 03: counting by one in fp16."""
    if answer == 2048:
        return correct("2,048 + 1 lies between two neighbours and goes back to the even one")
    nudges = {
        1024: "At 1,024 the step is 1: one more still counts.",
        2047: "2,047 + 1 = 2,048 can be held. And then?",
        65504: "That is the largest number. Digits run out long before range.",
    }
    nudge = nudges.get(answer) if isinstance(answer, (int, float)) else None
    return not_yet("the counter stops where n + 1 is n", got=repr(answer),
                   nudge=nudge or "At which number is the step larger than 1?")  # fmt: skip


def smallest_update(answer: Any) -> Verdict:
    """Lesson 03: the smallest power of two that moves a bf16 weight of 64."""
    if answer == 0.5:
        return correct("the step at 64 is 0.5; a quarter is a tie and goes back to the even 64")
    nudges = {
        0.25: "Half a step is a tie: it goes to the even neighbour. Which is that?",
        64 * 2**-8: "Half a step is a tie: it goes to the even neighbour. Which is that?",
        2**-7: "That is the step at 1. At 64 it is larger.",
        1: "That works. Is there a smaller one?",
    }
    nudge = nudges.get(answer) if isinstance(answer, (int, float)) else None
    return not_yet("a power of two is wanted", got=repr(answer),
                   nudge=nudge or "How far is the next number after 64 in bf16?")  # fmt: skip


def skipped_steps(answer: Any) -> Verdict:
    """Lesson 03: halvings from 2^24 to 2^17."""
    if answer == 7:
        return correct("2^24, ..., 2^18 are skipped: seven halvings, and 2^17 works")
    nudge = "2^17 itself works: count the scales above it." if answer in (6, 8) else (
        "Each skip halves the scale. How many halvings from 2^24 to 2^17?")  # fmt: skip
    return not_yet("a number of steps is wanted", got=repr(answer), nudge=nudge)


def decode_float(function: Callable[[str, int, int], float]) -> Verdict:
    """Exercise 1: every pattern of three splits, one of them unknown to textbooks."""
    for form in (FORMATS["fp8 e5m2"], NumberFormat("a 3-2 split", 3, 2), FORMATS["bf16"]):
        step = 1 if form.bits < 10 else 251
        for number in range(0, 2**form.bits, step):
            bits = f"{number:0{form.bits}b}"
            found = function(bits, form.exponent_bits, form.mantissa_bits)
            if not isinstance(found, (int, float)):
                return not_yet("a number is wanted", got=repr(found), nudge=_RETURN)
            if not _same(found, form.decode(bits)):
                return not_yet(f"{bits} in {form.name}", expected=form.decode(bits), got=found,
                               nudge=_bits_nudge(form, bits, found))  # fmt: skip
    return correct("normal and subnormal numbers, both zeros, infinities and NaN, in three splits")


def _same(found: float, right: float) -> bool:
    return found == right or (math.isnan(found) and math.isnan(right))


def _bits_nudge(form: NumberFormat, bits: str, found: float) -> str:
    if found == -form.decode(bits):
        return "The size is right. What is the first bit for?"
    exponent = bits[1 : 1 + form.exponent_bits]
    if "1" not in exponent:
        return "The exponent is all zeros: a subnormal number has no leading 1, and exponent 1 - bias."
    if "0" not in exponent:
        return "The exponent is all ones: infinity if the mantissa is zero, else NaN."
    return "A normal number: is the bias 2^(exponent bits - 1) - 1, and is the leading 1 there?"


_RETURN = "Does every path through your function end in `return`?"
_GRADIENTS = [1, 1, 1, 1, math.inf, 1, 1, math.nan, math.inf, 1, 1, 1, 1, 1, 1, math.nan, 1, 1, 1, 1]


def loss_scaler(scaler_class: type) -> Verdict:
    """Exercise 2: scales, steps and parameters beside torch.amp.GradScaler's."""
    mine = scaler_class(2.0**10, 3)
    parameter, theirs = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer, reference = (torch.optim.SGD([p], lr=1.0) for p in (parameter, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler.scale(torch.zeros(()))
    for count, factor in enumerate(_GRADIENTS, start=1):
        scale, moved = scaler.get_scale(), math.isfinite(factor)
        parameter.grad = torch.tensor([factor * scale, scale])
        theirs.grad = parameter.grad.clone()
        stepped = mine.step(optimizer)
        scaler.step(reference)
        scaler.update()
        if parameter.isfinite().all() and not torch.equal(parameter, theirs):
            return not_yet(f"the parameters after step {count} differ", expected=theirs.tolist(),
                           got=parameter.tolist(), nudge=_UNSCALE)  # fmt: skip
        if not torch.equal(parameter, theirs):
            return not_yet(f"step {count} put a gradient that is not finite into the parameters",
                           nudge="Look at all gradients before the optimizer steps.")  # fmt: skip
        if mine.scale != scaler.get_scale():
            return not_yet(f"the scale after step {count}", expected=scaler.get_scale(),
                           got=mine.scale, nudge=_scale_nudge(moved, mine.scale, scale))  # fmt: skip
        if stepped is not moved:
            return not_yet(f"what step {count} returns", expected=moved, got=stepped,
                           nudge="True if the optimizer stepped, False if it was skipped.")  # fmt: skip
    return correct(f"{len(_GRADIENTS)} steps: scales and parameters equal to torch.amp.GradScaler's")


_UNSCALE = "The gradients are those of the scaled loss: divide by the scale, once, before the step."


def _scale_nudge(moved: bool, found: Any, before: float) -> str:
    if not moved:
        return "This gradient was not finite: the scale halves."
    if found == before:
        return "The good steps in a row have reached growth_interval: the scale doubles."
    return "Good steps count in a row: a skip, and a doubling, start the count anew."


def clipped_step(function: Callable[..., Any]) -> Verdict:
    """Exercise 3: the same parameters as a clipped step in fp32, at two scales."""
    for scale in (2.0**16, 2.0**4):
        parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
        function((parameter * torch.tensor([30.0, 40.0])).sum(), [parameter], optimizer, scaler, 0.5)
        moved = torch.tensor([1.0, 2.0]) - parameter.detach()
        norm = float(moved.norm())
        if abs(norm - 0.5) > 1e-4:
            return not_yet(expected="a step of norm 0.5", got=f"{norm:.3g} at scale {scale:.0f}",
                           nudge=_clip_nudge(norm, scale))  # fmt: skip
        if scaler.get_scale() != 2 * scale:
            return not_yet("the scaler was not updated", nudge="The last line is scaler.update().")
    return correct("the norm of the step is the clip, whatever the scale")


def _clip_nudge(norm: float, scale: float) -> str:
    if norm == 0:
        return "The parameters did not move. Are backward and scaler.step there?"
    if abs(norm - 50) < 1:
        return "Nothing was clipped."
    if norm < 0.4:
        return "The scaled gradients were clipped, and the scaler divided afterwards."
    return f"Did scale {scale:.0f} multiply the loss, and did it leave the gradients before the step?"


def find_bad_data(function: Callable[[list[StepRecord]], Any]) -> Verdict:
    """Exercise 4: the lab's run, another one, and one whose data are fine."""
    for step, row in [(9, 13), (5, 30)]:
        found = function(spoiled_run(step, row))
        if found != (step, row):
            return not_yet(f"a run with a NaN at step {step}, row {row}", expected=(step, row),
                           got=found, nudge=_data_nudge(found, step))  # fmt: skip
    found = function(run(init_scale=2.0**22))
    if found is not None:
        nudge = "Skipped steps of a scale that searches are no fault of the data."
        return not_yet("a run whose data are fine", expected=None, got=found, nudge=nudge)
    return correct("step and row of the sample, and no false alarm")


def _data_nudge(found: Any, step: int) -> str:
    if found is None:
        return f"{_RETURN} Which kind does a bad input have?"
    if isinstance(found, tuple) and len(found) == 2 and found[0] == step:
        return "The step is right. `rows` is a tuple: its first entry is the row."
    if isinstance(found, tuple) and found and isinstance(found[0], int) and found[0] < step:
        return "That step was skipped because the scale was too large: its kind is a gradient."
    return "A tuple of two numbers is wanted: record.step, and the first of record.first.rows."


_EVIDENCE = {
    "no unscale": "no tensor is infinite or NaN, and the two norms differ by the scale",
    "norm in fp16": "the first bad tensor is the gradient of the norm, and fp32 trains",
    "loss overflows": "the first bad thing is the loss, every module before it is finite, fp32 trains",
    "learning rate": "the loss rises before anything breaks, and the fp32 twin explodes",
    "NaN in the data": "the first bad tensor is an input, and the fp32 twin has it at the same step",
}


def diagnosis(answer: dict[str, Any]) -> Verdict:
    """Exercise 5: the fault of each mystery run."""
    if not isinstance(answer, dict) or set(answer) != set("ABCDE"):
        return not_yet('a fault for each of "A" to "E" is wanted', got=repr(answer))
    if strange := [value for value in answer.values() if value not in FAULTS]:
        return not_yet("one of FAULTS is wanted", expected=", ".join(FAULTS), got=strange[0])
    wrong = [name for name in sorted(answer) if answer[name] != fault_of(name)]
    if wrong:
        name = wrong[0]
        nudge = f"With {answer[name]!r} you would see: {_EVIDENCE[answer[name]]}. Do you, in run {name}?"
        return not_yet(f"{5 - len(wrong)} of 5 are right; look at run {name} again", nudge=nudge)
    return correct("; ".join(f"{name}: {_EVIDENCE[fault_of(name)]}" for name in "ABCDE"))
