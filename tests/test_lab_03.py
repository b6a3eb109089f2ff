"""The checks of lab 03: right answers, the untouched lab, and plausible wrong answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_cases import definitions, nudged, solved_lab, untouched_lab
from torch import nn

from utils.labs import check
from utils.labs.checking import run_check
from utils.labs.faulty_runs import FAULTS, fault_of, mystery_runs
from utils.labs.verdict import Status
from utils.lessons.lesson_03 import checks as lab_03

LAB = solved_lab("beginner/03_when_numbers_break")
EXERCISES = {
    "decode_float": "decode_float", "loss_scaler": "LossScaler", "clipped_step": "clipped_step",
    "in_fp32": "InFp32", "find_bad_data": "find_bad_data",
}  # fmt: skip
RIGHT = {name: fault_of(name) for name in "ABCDE"}


NAMES = {"torch": torch, "F": F, "nn": nn, "math": math}


@pytest.fixture(scope="module")
def solved() -> dict[str, Any]:
    return definitions(LAB, **NAMES)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_is_correct(solved: dict[str, Any], exercise: str) -> None:
    verdict = getattr(lab_03, exercise)(solved[EXERCISES[exercise]])
    assert verdict.status is Status.CORRECT, verdict


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_untouched_lab_is_not_attempted(exercise: str) -> None:
    answer = definitions(untouched_lab("beginner/03_when_numbers_break"), **NAMES)[
        EXERCISES[exercise]
    ]
    assert check(f"03.{exercise}", answer).status is Status.NOT_ATTEMPTED
    blank = dict.fromkeys("ABCDE", ...)
    assert check("03.diagnosis", blank).status is Status.NOT_ATTEMPTED


# The questions of the lesson


def test_the_questions_accept_the_right_answers() -> None:
    assert lab_03.counter_stops(2048).status is Status.CORRECT
    assert lab_03.smallest_update(0.5).status is Status.CORRECT
    assert lab_03.skipped_steps(7).status is Status.CORRECT
    counter = torch.tensor(2048.0, dtype=torch.float16)
    assert counter + 1 == counter
    assert counter - 1 + 1 == counter
    weight = torch.tensor(64.0, dtype=torch.bfloat16)
    assert weight + 0.5 != weight
    assert weight + 0.25 == weight


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        ("counter_stops", 65504, "Digits run out"),
        ("counter_stops", 1024, "the step is 1"),
        ("counter_stops", "2048", "a number, where n + 1 is n"),
        ("smallest_update", 0.25, "a tie"),
        ("smallest_update", 1, "a smaller one"),
        ("smallest_update", [1], "a power of two"),
        ("skipped_steps", 8, "itself works"),
        ("skipped_steps", math.nan, "no finite number"),
        ("smallest_update", True, "a power of two"),
        ("skipped_steps", 128, "How many halvings"),
    ],
)
def test_wrong_answers_to_questions_are_nudged(question: str, answer: Any, words: str) -> None:
    nudged(getattr(lab_03, question)(answer), words)


# Exercise 1


def decode(bits: str, x: int, m: int, *, bias: int | None = None, subnormal: bool = True,
           special: bool = True, signed: bool = True) -> float:  # fmt: skip
    """A decoder with a part left out."""
    bias = 2 ** (x - 1) - 1 if bias is None else bias
    sign = -1.0 if bits[0] == "1" and signed else 1.0
    field, fraction = int(bits[1 : 1 + x], 2), int(bits[1 + x :], 2) / 2**m
    if special and field == 2**x - 1:
        return math.nan if fraction else sign * math.inf
    if subnormal and field == 0:
        return sign * 2.0 ** (1 - bias) * fraction
    return sign * 2.0 ** (field - bias) * (1 + fraction)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"subnormal": False}, "no leading 1"),
        ({"special": False}, "all ones"),
        ({"signed": False}, "first bit"),
        ({"bias": 16}, "leading 1, and exponent 1 - bias"),
    ],
)
def test_decoders_with_a_part_left_out(mistake: dict[str, Any], words: str) -> None:
    nudged(lab_03.decode_float(lambda *a: decode(*a, **mistake)), words)


def test_a_decoder_that_loses_the_sign_of_zero() -> None:
    nudged(lab_03.decode_float(lambda *a: decode(*a) or 0.0), "Zero has a sign, too")


def test_a_decoder_for_fp8_alone_fails_elsewhere() -> None:
    nudged(lab_03.decode_float(lambda b, x, m: decode(b, x, m, bias=15)), "exponent 1 - bias")
    nudged(lab_03.decode_float(lambda *a: None), "`return`")


# Exercise 2


class Scaler:
    """A loss scaler that can be broken by overriding a part."""

    unscales, checks, resets, doubles, halves, answers = True, True, True, True, True, True

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.scale, self.interval, self.good = scale, growth_interval, 0

    def step(self, optimizer: torch.optim.Optimizer) -> bool | None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in gradients:
            gradient.div_(self.scale if self.unscales else 1)
        if self.checks and not all(g.isfinite().all() for g in gradients):
            self.scale = self.scale / 2 if self.halves else self.scale
            self.good = 0 if self.resets else self.good
            return False
        optimizer.step()
        self.good += 1
        if self.doubles and self.good == self.interval:
            self.scale, self.good = 2 * self.scale, 0
        return True if self.answers else None


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("unscales", "divide by the scale"),
        ("checks", "before the optimizer steps"),
        ("resets", "in a row"),
        ("doubles", "the scale doubles"),
        ("halves", "the scale halves"),
        ("answers", "returns nothing"),
    ],
)
def test_scalers_with_a_mistake(mistake: str, words: str) -> None:
    assert lab_03.loss_scaler(Scaler).status is Status.CORRECT
    nudged(lab_03.loss_scaler(type("Broken", (Scaler,), {mistake: False})), words)


def looking_at(part: Any) -> type:
    """A scaler that looks at a part of the gradients for what is not finite."""

    class Partial(Scaler):
        def step(self, optimizer: torch.optim.Optimizer) -> bool:
            groups = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
            Partial.checks = any(not g.isfinite().all() for g in part(groups))
            return super().step(optimizer)

    return Partial


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda groups: [groups[0][0]], "element 0 of parameter 1 of 3"),
        (
            lambda groups: [g[:1] for group in groups for g in group],
            "element 1 of parameter 0 of 3",
        ),
        (lambda groups: groups[0], "element 2 of parameter 2 of 3"),
        (lambda groups: groups[-1], "element 0 of parameter 0 of 3"),
    ],
)
def test_scalers_that_look_at_a_part(part: Any, words: str) -> None:
    assert lab_03.loss_scaler(looking_at(lambda groups: sum(groups, []))).status is Status.CORRECT  # noqa: RUF017
    verdict = lab_03.loss_scaler(looking_at(part))
    nudged(verdict, words)
    nudged(verdict, "at every element")


def test_scalers_without_their_parts() -> None:
    nudged(lab_03.loss_scaler(lambda scale, interval: 12), "a method `step`")
    without_scale = type(
        "NoScale", (), {"__init__": lambda self, *a: None, "step": lambda self, o: True}
    )
    nudged(lab_03.loss_scaler(without_scale), "the parameters after step 1 differ")
    nameless = type("Nameless", (Scaler,), {"__getattribute__": lambda self, name: (
        None if name == "scale" and self.good != 0 else object.__getattribute__(self, name))})  # fmt: skip
    nudged(lab_03.loss_scaler(nameless), "an attribute `scale`")
    numpy_flag = type("Numpy", (Scaler,), {"step": lambda self, o: np.bool_(Scaler.step(self, o))})
    assert lab_03.loss_scaler(numpy_flag).status is Status.CORRECT


# Exercise 3


def clip_alone(parameters: Any, most: float) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], most)


def scale_to(parameters: Any, most: float) -> None:
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    for parameter in parameters:
        parameter.grad.mul_(most / norm)


def to_nan(parameters: Any, most: float) -> None:
    for parameter in parameters:
        parameter.grad.fill_(math.nan)


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        (clip_alone, "Each parameter was clipped by itself"),
        (scale_to, "clipping never makes them larger"),
        (to_nan, "did not move"),
        (nn.utils.clip_grad_value_, "did it leave the gradients"),
    ],
)
def test_clips_of_another_kind(clip: Any, words: str) -> None:
    def clipped_step(loss: Any, parameters: Any, optimizer: Any, scaler: Any, most: float) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(parameters, most)
        scaler.step(optimizer)
        scaler.update()

    verdict = lab_03.clipped_step(clipped_step)
    assert verdict.status is Status.NOT_YET
    if clip is not to_nan:
        nudged(verdict, words)


def test_a_step_that_the_scaler_does_not_guard() -> None:
    def clipped_step(loss: Any, parameters: Any, optimizer: Any, scaler: Any, most: float) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, most)
        optimizer.step()
        scaler.update()

    nudged(lab_03.clipped_step(clipped_step), "Which call of the scaler skips that step?")


def step_without(*left_out: str, order: str = "scale unscale clip step update") -> Any:
    def clipped_step(loss: Any, parameters: Any, optimizer: Any, scaler: Any, most: float) -> None:
        parts = {
            "scale": lambda: scaler.scale(loss).backward(),
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: nn.utils.clip_grad_norm_(parameters, most),
            "step": lambda: scaler.step(optimizer),
            "update": scaler.update,
        }
        for part in order.split():
            if part not in left_out:
                parts[part]()

    return clipped_step


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (step_without("unscale"), "the scaler divided afterwards"),
        (step_without(order="scale clip unscale step update"), "the scaler divided afterwards"),
        (step_without("clip"), "Nothing was clipped"),
        (step_without("step", "update"), "did not move"),
        (lambda loss, p, o, s, m: (s.scale(loss).backward(), s.step(o), s.update())[0], "Nothing"),
    ],
)
def test_clips_in_the_wrong_place(answer: Any, words: str) -> None:
    nudged(lab_03.clipped_step(answer), words)


def test_a_step_by_hand_forgets_the_scaler() -> None:
    def clipped_step(loss: Any, parameters: Any, optimizer: Any, scaler: Any, most: float) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, most)
        optimizer.step()

    nudged(lab_03.clipped_step(clipped_step), "not updated")


# Exercise 4


class Lifted(nn.Module):
    """A module around a layer, with a part left out."""

    def __init__(
        self, layer: nn.Module, lifts: bool, enabled: bool, kept: bool, gives: Any
    ) -> None:
        super().__init__()
        self.given = (layer,) if not kept else None
        self.layer = layer if kept else None
        self.lifts, self.enabled, self.gives = lifts, enabled, gives

    def forward(self, x: torch.Tensor) -> Any:
        layer = self.layer or self.given[0]
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.enabled):
            return self.gives(layer(x.float() if self.lifts else x))


def lifted(lifts: bool = True, enabled: bool = False, kept: bool = True, gives: Any = None) -> Any:
    return lambda layer: Lifted(layer, lifts, enabled, kept, gives or (lambda y: y))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lifted(lifts=False), "Its input is still fp16"),
        (lifted(lifts=False, enabled=True), "Its input is still fp16"),
        (lifted(enabled=True), "Autocast casts products down again"),
        (lifted(kept=False), "as an attribute of the module"),
        (lifted(gives=lambda y: y.half()), "in torch.float16"),
        (lifted(gives=lambda y: None), "Is there a `return`?"),
        (lambda layer: lambda x: layer(x.float()), "Derive it from nn.Module"),
    ],
)
def test_layers_that_are_not_kept_in_fp32(answer: Any, words: str) -> None:
    nudged(lab_03.in_fp32(answer), words)


class WithoutInit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Doubled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.double()).float()


class Untrained(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


class Detached(Untrained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            found = self.layer(x.float())
        return found.detach() + 0 * found


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (WithoutInit, "`def __init__(self, layer):`"),
        (Doubled, "change the layer itself"),
        (Untrained, "carries no gradient"),
        (Detached, "do not get the gradients of a plain layer"),
    ],
)
def test_layers_that_are_changed_or_never_trained(answer: Any, words: str) -> None:
    nudged(run_check(lab_03.in_fp32, answer), words)


def test_a_layer_that_leaves_autocast_off() -> None:
    class Off(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_autocast_enabled("cpu", False)
            return self.layer(x.float())

    nudged(lab_03.in_fp32(Off), "switches it on again")


# Exercise 5


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda rs: next(((r.step, r.first.rows[0]) for r in reversed(rs)
                          if r.first and r.first.kind == "input"), None), "the first of them"),
        (lambda rs: next(((r.step, r.first.rows[:1]) for r in rs if r.skipped), None), "too large"),
        (lambda rs: next((r.step, r.first.rows) for r in rs if r.first and r.first.kind == "input"),
         "`rows` is a tuple"),
        (lambda rs: None, "Which kind"),
        (lambda rs: 9, "a tuple of two numbers"),
    ],
)  # fmt: skip
def test_searches_that_find_something_else(answer: Any, words: str) -> None:
    nudged(lab_03.find_bad_data(answer), words)


def test_a_search_for_the_first_loss_that_is_nan() -> None:
    def find(records: Any) -> Any:
        return next(((r.step, r.first.rows[0]) for r in records if math.isnan(r.loss)), None)

    nudged(lab_03.find_bad_data(find), "A loss that is NaN is no proof")


def test_a_search_may_give_a_list(solved: dict[str, Any]) -> None:
    def find(records: Any) -> Any:
        found = solved["find_bad_data"](records)
        return found and list(found)

    assert lab_03.find_bad_data(find).status is Status.CORRECT


def test_a_search_with_a_false_alarm() -> None:
    def find(records: Any) -> Any:
        bad = [r for r in records if r.first]
        inputs = [r for r in bad if r.first.kind == "input"]
        return (inputs or bad)[0].step, ((inputs or bad)[0].first.rows or (0,))[0]

    nudged(lab_03.find_bad_data(find), "no fault of the data")


# Exercise 6


def test_the_right_diagnosis_is_correct() -> None:
    assert lab_03.diagnosis(RIGHT).status is Status.CORRECT


def test_wrong_diagnoses_are_nudged_by_evidence() -> None:
    nudged(lab_03.diagnosis(RIGHT | {"A": RIGHT["D"], "D": RIGHT["A"]}), "in run A?")
    nudged(lab_03.diagnosis(RIGHT | {"E": "learning rate"}), "the fp32 twin explodes")
    nudged(lab_03.diagnosis(RIGHT | {"E": "fp16"}), "one of FAULTS")
    nudged(lab_03.diagnosis({"A": "learning rate"}), "is wanted")


def test_the_evidence_tells_the_faults_apart() -> None:
    found = {}
    for name, twins in mystery_runs().items():
        low, full = twins["fp16"], twins["fp32"]
        first = next((r.first for r in low if r.first), None)
        if first is None:
            found[name] = "no unscale" if low[0].step_norm < 1e-3 * low[0].grad_norm else ""
        elif first.kind == "input":
            found[name] = "NaN in the data"
        elif not math.isfinite(full[-1].loss) or full[-1].loss > 10 * full[0].loss:
            found[name] = "learning rate"
        else:
            found[name] = "loss overflows" if first.kind == "loss" else "norm in fp16"
        if found[name] == "norm in fp16":
            assert (first.kind, first.module) == ("gradient", "norm")
    assert found == RIGHT
    assert sorted(found.values()) == sorted(FAULTS)
