"""The mistakes that everybody makes first with the front door: each gets a sentence and the right line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import utils
from utils.simulation import extrapolate

Pair = tuple[nn.Module, torch.optim.Optimizer]


def build() -> Pair:
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


def build_alone() -> nn.Module:
    return nn.Linear(4, 4)


def build_at(layers: int) -> Pair:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def sized_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    step(model, optimizer)


def no_arguments() -> None: ...


model, optimizer = build()
simulate: Any = utils.simulate
measure: Any = utils.measure
sweep: Any = utils.sweep
deep: Any = extrapolate

# What was written, the words that say what was meant, and the line to write.
SLIPS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a model for build": (lambda: simulate(model, step), "build is a model, Linear", "simulate(build, step)"),
    "build()": (lambda: simulate(build(), step), "what build() returned", "simulate(build, step)"),
    "the model alone": (lambda: simulate(build_alone, step), "returns the model alone", "return model, torch.optim"),
    "swapped": (lambda: simulate(step, build), "swapped", "simulate(build, step)"),
    "no arguments": (lambda: simulate(build, no_arguments), "its arguments are none", "def step(model, optimizer)"),
    "step()": (lambda: simulate(build, None), "leave out its parentheses", "def step(model, optimizer)"),
    "a model for step": (lambda: simulate(build, model), "step is a model", "def step(model, optimizer)"),
    "build at a depth": (lambda: simulate(build_at, step), "build needs layers", "simulate(lambda: build(layers), step)"),
    "torch.device": (lambda: simulate(build, step, device=torch.device("cuda")), "device is cuda", 'device="A100 80GB"'),
    "cuda:0": (lambda: simulate(build, step, device="cuda:0"), "no device of this machine", 'device="cpu"'),
    "device=5": (lambda: simulate(build, step, device=5), "device is 5", 'device="A100 80GB"'),
    "world in quotes": (lambda: simulate(build, step, world="8"), "world is '8'", "world=8"),
    "no step": (lambda: simulate(build), "missing", "simulate(build, step)"),
    "a wrong name": (lambda: simulate(build, step, devise="cpu"), "no argument devise", "device"),
    "measure a model": (lambda: measure(model, optimizer), "step is a model", "measure(step, model=model"),
    "measure step()": (lambda: measure(None, model=model), "leave out its parentheses", "measure(step, model=model"),
    "measure with arguments": (lambda: measure(step, model=model), "step needs model, optimizer", "measure(lambda: step(model, optimizer)"),
    "measure by place": (lambda: measure(no_arguments, model), "without a name", "model="),
    "measure swapped": (lambda: measure(no_arguments, model=optimizer, optimizer=model), "swapped", "measure(step, model=model"),
    "measure build()": (lambda: measure(no_arguments, model=build()), "as build() returns them", "model, optimizer = build()"),
    "measure no model": (lambda: measure(no_arguments), "missing", "measure(step, model="),
    "a class of optimizers": (lambda: measure(no_arguments, model=model, optimizer=torch.optim.SGD), "not one of its objects", "SGD(model.parameters())"),
    "a model for build_at": (lambda: deep(model, step, layers=9), "build_at is a model", "def build_at(layers)"),
    "build for build_at": (lambda: deep(build, step, layers=9), "build_at is a function of ()", "def build_at(layers)"),
    "build_at swapped": (lambda: deep(step, build_at, layers=9), "swapped", "extrapolate(build_at, step)"),
    "no batch in the step": (lambda: deep(build_at, step, layers=9, batch=512), "model, optimizer, batch", "def step(model, optimizer, batch)"),
    "sweep swapped": (lambda: sweep(sized_step, build_at, layers=9, batches=[8]), "swapped", "sweep(build_at, step)"),
    "sweep without batch": (lambda: sweep(build_at, step, layers=9, batches=[8]), "model, optimizer, batch", "def step(model, optimizer, batch)"),
    "layers in quotes": (lambda: sweep(build_at, sized_step, layers="9", batches=[8]), "layers is '9'", "without quotes: 9"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_a_first_slip_gets_the_right_line(slip: str) -> None:
    call, meant, line = SLIPS[slip]
    with pytest.raises(ValueError) as raised:
        call()
    assert meant in str(raised.value)
    assert line in str(raised.value)


def test_a_step_with_an_error_of_its_own_keeps_it() -> None:
    def wrong(model: nn.Module, optimizer: Any) -> None:
        model.no_such_thing()

    with pytest.raises(AttributeError, match="no_such_thing"):
        simulate(build_alone, wrong, device="cpu")
    with pytest.raises(TypeError, match="unsupported operand"):
        simulate(build, lambda model, optimizer: 1 + "one", device="cpu")  # type: ignore[operator]


def test_what_is_right_runs() -> None:
    assert simulate(build, step, device="cpu").peak_bytes > 0
    assert simulate(
        lambda depth=2: build_at(depth), lambda *both: step(*both), device="cpu"
    ).peak_bytes
    assert deep(build_at, step, layers=9, device="cpu").peak_bytes > 0
