"""Checks of lab 03's exercises 2 and 3: a loss scaler by hand, and a clipped step with PyTorch's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from utils.labs.cases import judge, takes
from utils.labs.kinds import flag, function, number
from utils.labs.verdict import Verdict, correct, not_yet, shown

_FACTORS = [1, 1, 1, 1, math.inf, 1, 1, math.nan, math.inf, 1, 1, 1, 1, 1, 1, math.nan, 1, 1, 1, 1]
_PLACES = {5: (0, 0), 8: (0, 1), 9: (1, 0), 16: (2, 2)}  # parameter and element that a step spoils


@takes(function("a class"))
def loss_scaler(answer: Callable[[float, int], Any]) -> Verdict:
    """Exercise 2: scales, steps and parameters beside torch.amp.GradScaler's."""
    mine = answer(2.0**10, 3)
    if not callable(getattr(mine, "step", None)):
        return not_yet("an object with a method `step` is wanted", got=shown(mine))
    (ours, optimizer), (theirs, reference) = _three_parameters(), _three_parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scaler.scale(torch.zeros(()))
    for count, factor in enumerate(_FACTORS, start=1):
        scale, moved = scaler.get_scale(), math.isfinite(factor)
        for pair in (ours, theirs):
            _give_gradients(pair, scale, factor, _PLACES.get(count))
        with _calls_of_pytorchs_own() as calls:
            stepped = mine.step(optimizer)
        if calls:
            return not_yet(
                "torch.amp.GradScaler did the work",
                got=f"its method `{calls[0]}`",
                nudge="By hand: divide, look at every element, then step or halve.",
            )
        scaler.step(reference)
        scaler.update()
        problem = (
            _problem_of_parameters(ours, theirs, count)
            or _problem_of_scale(mine, scaler.get_scale(), scale, count, moved)
            or judge(
                flag("whether it stepped, True or False,").returned(stepped),
                moved,
                f"what step {count} returns",
                nudge="True if the optimizer stepped, False if it was skipped.",
            )
        )
        if problem:
            return problem
    return correct(f"{len(_FACTORS)} steps: scales and parameters equal to torch.amp.GradScaler's")


@contextlib.contextmanager
def _calls_of_pytorchs_own() -> Iterator[list[str]]:
    """Inside, calls of a `torch.amp.GradScaler`, or of a class made from it, are noted."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(torch.amp.GradScaler, name)
        return lambda *args, **settings: calls.append(name) or real(*args, **settings)

    with contextlib.ExitStack() as patches:
        for name in ("unscale_", "step", "update"):
            patch = mock.patch.object(torch.amp.GradScaler, name, noted(name))
            patches.enter_context(patch)
        yield calls


def _three_parameters() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Three parameters in two groups, since an optimizer may have several."""
    found = [nn.Parameter(torch.zeros(size)) for size in (2, 1, 3)]
    groups = [{"params": found[:2]}, {"params": found[2:]}]
    return found, torch.optim.SGD(groups, lr=1.0)


def _give_gradients(
    parameters: list[nn.Parameter], scale: float, factor: float, place: tuple[int, int] | None
) -> None:
    gradients = [torch.full_like(parameter, scale) for parameter in parameters]
    if place:
        gradients[place[0]][place[1]] = factor * scale
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _problem_of_parameters(ours: list[Any], theirs: list[Any], count: int) -> Verdict | None:
    if all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        return None
    if not all(parameter.isfinite().all() for parameter in ours):
        place = _PLACES.get(count)
        where = f"; it was element {place[1]} of parameter {place[0]} of 3" if place else ""
        return not_yet(
            f"step {count} put a gradient that is not finite into the parameters{where}",
            nudge="Look at all gradients, and at every element, before the optimizer steps.",
        )
    nudge = (
        "The gradients are those of the scaled loss: divide by the scale, once, before the step."
    )
    return not_yet(
        f"the parameters after step {count} differ",
        expected=[p.tolist() for p in theirs],
        got=[p.tolist() for p in ours],
        nudge=nudge,
    )


def _problem_of_scale(
    mine: Any, right: float, before: float, count: int, moved: bool
) -> Verdict | None:
    found = number("an attribute `scale`, a number,").of(getattr(mine, "scale", None))
    nudge = "Good steps count in a row: a skip, and a doubling, start the count anew."
    if not moved:
        nudge = "This gradient was not finite: the scale halves."
    elif found == before:
        nudge = "The good steps in a row have reached growth_interval: the scale doubles."
    return judge(found, right, f"the scale after step {count}", nudge=nudge)


_MOST = 0.5  # the norm that exercise 3 clips to


@takes(function())
def clipped_step(answer: Callable[..., Any]) -> Verdict:
    """Exercise 3: the same parameters as a clipped step in fp32: large, small, and overflowing."""
    for scale in (2.0**16, 2.0**4):
        for size in (1.0, 1e-3):
            gradients = [size * torch.tensor([30.0, 40.0]), size * torch.tensor([0.0, 120.0])]
            if problem := _problem_of_clip(answer, gradients, scale):
                return problem
    moved, found = _clipped(answer, [torch.tensor([math.inf, 1.0]), torch.ones(2)], 2.0**16)
    if not torch.equal(moved, torch.zeros(4)):
        nudge = "optimizer.step() steps even then. Which call of the scaler skips that step?"
        return not_yet(
            "a gradient overflowed, and the parameters moved", got=moved.tolist(), nudge=nudge
        )
    verdict = judge(
        found, 2.0**15, "the scale after an overflow", nudge="Does scaler.update() come last?"
    )
    return verdict or correct(
        "the norm of the step is the clip, whatever the scale; small ones stay"
    )


def _clipped(
    answer: Callable[..., Any], gradients: list[torch.Tensor], scale: float
) -> tuple[Any, float]:
    """How far a step moves the parameters, and the scale after it."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
    loss = sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True))
    if any(
        g.isinf().any() for g in gradients
    ):  # 0 x inf is no loss, its gradient is what is wanted
        loss = sum(p.sum() for p in parameters)
        parameters[0].register_hook(lambda g: g * gradients[0])
    answer(loss, parameters, optimizer, scaler, _MOST)
    return -torch.cat([p.detach() for p in parameters]), scaler.get_scale()


def _problem_of_clip(answer: Any, gradients: list[torch.Tensor], scale: float) -> Verdict | None:
    moved, after = _clipped(answer, gradients, scale)
    whole_norm = float(torch.cat(gradients).norm())
    right = torch.cat(gradients) * min(1.0, _MOST / whole_norm)
    if not torch.allclose(moved, right, rtol=1e-3, atol=1e-6):
        norm = float(moved.norm())
        return not_yet(
            f"gradients of norm {whole_norm:.3g}",
            expected=f"a step of norm {right.norm():.3g}",
            got=f"norm {norm:.3g} at scale {scale:.0f}: {moved.tolist()}",
            nudge=_clip_nudge(norm, whole_norm, scale),
        )
    return judge(
        after, 2 * scale, "the scaler was not updated", nudge="The last line is scaler.update()."
    )


def _clip_nudge(norm: float, whole_norm: float, scale: float) -> str:
    if norm == 0:
        return "The parameters did not move. Are backward and scaler.step there?"
    if whole_norm < _MOST and norm > whole_norm * 1.01:
        return "Those gradients are below max_norm already: clipping never makes them larger."
    if abs(norm / whole_norm - 1) < 0.01:
        return "Nothing was clipped." if whole_norm > _MOST else "Clipping keeps the direction."
    if abs(norm - _MOST * 2**0.5) < 0.01:
        return "Each parameter was clipped by itself. max_norm is for the norm of all together."
    if norm < 0.9 * min(_MOST, whole_norm):
        return "The scaled gradients were clipped, and the scaler divided afterwards."
    return (
        f"Did scale {scale:.0f} multiply the loss, and did it leave the gradients before the step?"
    )
