"""Answers to the exercises of lab 03 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.labs.faulty_runs import fault_of
from utils.labs.mistakes import KnownAnswers

known = KnownAnswers()


def decode(
    bits: str,
    x: int,
    m: int,
    *,
    bias: int | None = None,
    subnormal: bool = True,
    special: bool = True,
    signed: bool = True,
) -> float:
    """A decoder with a part left out."""
    shift = 2 ** (x - 1) - 1 if bias is None else bias
    sign = -1.0 if bits[0] == "1" and signed else 1.0
    field, fraction = int(bits[1 : 1 + x], 2), int(bits[1 + x :], 2) / 2**m
    if special and field == 2**x - 1:
        return math.nan if fraction else sign * math.inf
    if subnormal and field == 0:
        return sign * 2.0 ** (1 - shift) * fraction
    return sign * 2.0 ** (field - shift) * (1 + fraction)


known.mistakes(
    "decode_float",
    no_subnormals=(lambda *bits: decode(*bits, subnormal=False), "no leading 1"),
    no_infinities=(lambda *bits: decode(*bits, special=False), "all ones"),
    no_sign=(lambda *bits: decode(*bits, signed=False), "first bit"),
    another_bias=(lambda *bits: decode(*bits, bias=16), "leading 1, and exponent 1 - bias"),
    zero_without_a_sign=(lambda *bits: decode(*bits) or 0.0, "Zero has a sign, too"),
    fp8_alone=(lambda *bits: decode(*bits, bias=15), "exponent 1 - bias"),
    no_return=(lambda *bits: None, "`return`"),
)


class Scaler:
    """A loss scaler that can be broken by overriding a part."""

    unscales, checks, resets, doubles, halves, answers = True, True, True, True, True, True

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.scale, self.interval, self.good = scale, growth_interval, 0

    def finite(self, groups: list[list[torch.Tensor]]) -> bool:
        return all(bool(g.isfinite().all()) for group in groups for g in group)

    def step(self, optimizer: torch.optim.Optimizer) -> bool | None:
        groups = [[p.grad for p in group["params"]] for group in optimizer.param_groups]
        for gradient in [g for group in groups for g in group]:
            gradient.div_(self.scale if self.unscales else 1)
        if self.checks and not self.finite(groups):
            self.scale = self.scale / 2 if self.halves else self.scale
            self.good = 0 if self.resets else self.good
            return False
        optimizer.step()
        self.good += 1
        if self.doubles and self.good == self.interval:
            self.scale, self.good = 2 * self.scale, 0
        return True if self.answers else None


def without(part: str) -> type:
    """A scaler that leaves a part out."""
    return type("Broken", (Scaler,), {part: False})


def looking_at(part: Callable[[list[list[torch.Tensor]]], list[torch.Tensor]]) -> type:
    """A scaler that looks at a part of the gradients for what is not finite."""

    def finite(self: Scaler, groups: list[list[torch.Tensor]]) -> bool:
        return all(bool(g.isfinite().all()) for g in part(groups))

    return type("Partial", (Scaler,), {"finite": finite})


class WithoutScale:
    """Steps never."""

    def __init__(self, scale: float, growth_interval: int) -> None: ...

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        return True


class LosesItsScale(Scaler):
    def __getattribute__(self, name: str) -> Any:
        is_lost = name == "scale" and self.good != 0
        return None if is_lost else object.__getattribute__(self, name)


@known.mistake("loss_scaler", "torch.amp.GradScaler did the work")
class Wrapped:
    """PyTorch's own scaler in another class."""

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.own = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
        self.own.scale(torch.zeros(()))

    @property
    def scale(self) -> float:
        return self.own.get_scale()

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        before = self.own.get_scale()
        self.own.step(optimizer)
        self.own.update()
        return self.own.get_scale() >= before


EVERY_ELEMENT = "Look at all gradients, and at every element"
known.mistakes(
    "loss_scaler",
    never_unscales=(without("unscales"), "divide by the scale"),
    never_checks=(without("checks"), "before the optimizer steps"),
    never_resets=(without("resets"), "in a row"),
    never_doubles=(without("doubles"), "the scale doubles"),
    never_halves=(without("halves"), "the scale halves"),
    no_return=(without("answers"), "returns nothing"),
    first_parameter=(
        looking_at(lambda groups: [groups[0][0]]),
        f"element 0 of parameter 1 of 3  {EVERY_ELEMENT}",
    ),
    first_element=(
        looking_at(lambda groups: [g[:1] for group in groups for g in group]),
        f"element 1 of parameter 0 of 3  {EVERY_ELEMENT}",
    ),
    first_group=(
        looking_at(lambda groups: groups[0]),
        f"element 2 of parameter 2 of 3  {EVERY_ELEMENT}",
    ),
    last_group=(
        looking_at(lambda groups: groups[-1]),
        f"element 0 of parameter 0 of 3  {EVERY_ELEMENT}",
    ),
    no_step=(lambda scale, interval: 12, "a method `step`"),
    no_scale=(WithoutScale, "the parameters after step 1 differ"),
    loses_its_scale=(LosesItsScale, "an attribute `scale`"),
)
known.rights(
    "loss_scaler",
    with_switches=Scaler,
    all_groups=looking_at(lambda groups: [g for group in groups for g in group]),
    flag_of_numpy=type(
        "Numpy", (Scaler,), {"step": lambda self, o: np.bool_(Scaler.step(self, o))}
    ),
)


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


def clipped(
    order: str = "scale unscale clip step update", clip: Any = nn.utils.clip_grad_norm_
) -> Callable[..., None]:
    """A step of these calls, with this clip."""

    def clipped_step(loss: Any, parameters: Any, optimizer: Any, scaler: Any, most: float) -> None:
        parts: dict[str, Callable[[], Any]] = {
            "scale": lambda: scaler.scale(loss).backward(),
            "backward": lambda: loss.backward(),
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: clip(parameters, most),
            "step": lambda: scaler.step(optimizer),
            "optimizer": lambda: optimizer.step(),
            "update": scaler.update,
        }
        for part in order.split():
            parts[part]()

    return clipped_step


known.mistakes(
    "clipped_step",
    each_by_itself=(clipped(clip=clip_alone), "Each parameter was clipped by itself"),
    makes_larger=(clipped(clip=scale_to), "clipping never makes them larger"),
    by_value=(clipped(clip=nn.utils.clip_grad_value_), "did it leave the gradients"),
    to_nan=(clipped(clip=to_nan), "norm nan at scale"),
    unguarded=(clipped("scale unscale clip optimizer update"), "Which call of the scaler skips"),
    never_unscaled=(clipped("scale clip step update"), "the scaler divided afterwards"),
    unscaled_late=(clipped("scale clip unscale step update"), "the scaler divided afterwards"),
    no_clip=(clipped("scale unscale step update"), "Nothing was clipped"),
    no_step=(clipped("scale unscale clip"), "did not move"),
    clip_forgotten=(clipped("scale step update"), "Nothing was clipped"),
    no_scaler=(clipped("backward clip optimizer"), "not updated"),
)


class Lifted(nn.Module):
    """A module around a layer, with a part left out."""

    def __init__(
        self, layer: nn.Module, lifts: bool, enabled: bool, kept: bool, gives: Any
    ) -> None:
        super().__init__()
        self.given = (layer,)  # in a tuple, where PyTorch does not find it
        self.layer = layer if kept else None
        self.lifts, self.enabled, self.gives = lifts, enabled, gives

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.enabled):
            return self.gives(self.given[0](x.float() if self.lifts else x))


def lifted(
    lifts: bool = True, enabled: bool = False, kept: bool = True, gives: Any = lambda y: y
) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: Lifted(layer, lifts, enabled, kept, gives)


known.mistakes(
    "in_fp32",
    not_lifted=(lifted(lifts=False), "Its input is still fp16"),
    nothing_done=(lifted(lifts=False, enabled=True), "Its input is still fp16"),
    autocast_on=(lifted(enabled=True), "Autocast casts products down again"),
    layer_not_kept=(lifted(kept=False), "as an attribute of the module"),
    gives_fp16=(lifted(gives=lambda y: y.half()), "in torch.float16"),
    no_return=(lifted(gives=lambda y: None), "Is there a `return`?"),
    no_module=(lambda layer: lambda x: layer(x.float()), "Derive it from nn.Module"),
)


@known.mistake("in_fp32", "`def __init__(self, layer):`")
class WithoutInit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Kept(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


@known.mistake("in_fp32", "change the layer itself")
class Doubled(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer.double()(x.double()).float()


@known.mistake("in_fp32", "carries no gradient")
class Untrained(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


@known.mistake("in_fp32", "do not get the gradients of a plain layer")
class Detached(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            found = self.layer(x.float())
        return found.detach() + 0 * found


@known.mistake("in_fp32", "switches it on again")
class LeavesItOff(Kept):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_autocast_enabled("cpu", False)
        return self.layer(x.float())


def _inputs(records: Any) -> list[Any]:
    return [r for r in records if r.first and r.first.kind == "input"]


@known.mistake("find_bad_data", "no fault of the data")
def false_alarm(records: Any) -> Any:
    bad = _inputs(records) or [r for r in records if r.first]
    return bad[0].step, (bad[0].first.rows or (0,))[0]


@known.right("find_bad_data")
def gives_a_list(solution: Any, records: Any) -> Any:
    found = solution(records)
    return found and list(found)


known.mistakes(
    "find_bad_data",
    the_last=(
        lambda records: next(((r.step, r.first.rows[0]) for r in _inputs(records)[::-1]), None),
        "the first of them",
    ),
    any_skipped_step=(
        lambda records: next(((r.step, r.first.rows[:1]) for r in records if r.skipped), None),
        "too large",
    ),
    all_rows=(
        lambda records: next(((r.step, r.first.rows) for r in _inputs(records)), None),
        "`rows` is a tuple",
    ),
    first_loss_that_is_nan=(
        lambda records: next(
            ((r.step, r.first.rows[0]) for r in records if math.isnan(r.loss)), None
        ),
        "A loss that is NaN is no proof",
    ),
    nothing_found=(lambda records: None, "Which kind"),
    a_number=(lambda records: 9, "a tuple of two numbers"),
)

known.mistakes(
    "diagnosis",
    swapped=({"A": fault_of("D"), "D": fault_of("A")}, "in run A?"),
    learning_rate=({"E": "learning rate"}, "the fp32 twin explodes"),
    no_fault=({"E": "fp16"}, "one of FAULTS"),
)
