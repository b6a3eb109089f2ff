"""The mistakes that everybody makes first with simulations: what was meant, and the right line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from utils.checked import short
from utils.memory.arguments import needed, takes, was_called

BUILD = "def build(): model = Net(); return model, torch.optim.AdamW(model.parameters())"
LARGEST_WORLD = 2**20


def refuse_known_mistakes(given: dict[str, Any]) -> None:
    """Look at what `simulate` was given, before anything runs.

    Raises:
        ValueError: a known mistake, with the line that was meant.
    """
    build, step = given.get("build", _build), given.get("step", _step)
    _look_at_order("simulate", "build", build, step, 0, 2)
    _look_at_build(build)
    look_at_step("simulate", step, ("model", "optimizer"))
    look_at_machine("simulate", given)


def look_at_depths(where: str, in_step: tuple[str, ...]) -> Callable[[dict[str, Any]], None]:
    """The same for the functions that make the model at a depth: `build_at(layers)`."""

    def at_depths(given: dict[str, Any]) -> None:
        build_at, step = given.get("build_at", _build_at), given.get("step", lambda *_: None)
        more = in_step if given.get("batch") is not None or where == "sweep" else in_step[:2]
        _look_at_order(where, "build_at", build_at, step, 1, len(more))
        if isinstance(build_at, nn.Module) or not takes_or_calls(build_at, 1):
            raise ValueError(
                f"{where}: build_at is {_said(build_at)}. It must be a function that makes model and "
                "optimizer at a depth: def build_at(layers): model = Net(layers); return model, "
                "torch.optim.AdamW(model.parameters())."
            )
        look_at_step(where, step, more)
        look_at_machine(where, given)

    return at_depths


def takes_or_calls(function: Any, count: int) -> bool:
    """Whether something is a function of `count` arguments."""
    return callable(function) and takes(function, count)


def _look_at_order(
    where: str, name: str, build: Any, step: Any, in_build: int, in_step: int
) -> None:
    """Refuse a step before its build."""
    for one in (build, step):
        if not callable(one) or isinstance(one, nn.Module | type) or not needed_is_known(one):
            return
    fits = takes(build, in_build) and takes(step, in_step)
    if not fits and takes(build, in_step) and takes(step, in_build):
        raise ValueError(f"{where}: {name} and step are swapped. Write {where}({name}, step).")


def needed_is_known(function: Any) -> bool:
    """Whether a function's arguments tell it from another: not with `*args`."""
    return not (takes(function, 0) and takes(function, 9))


def _look_at_build(build: Any) -> None:
    if isinstance(build, nn.Module):
        raise ValueError(
            f"simulate: build is a model, {type(build).__name__}, which exists already. It must be "
            f"the function that makes it, inside of the simulation: {BUILD}, then "
            "simulate(build, step)."
        )
    if isinstance(build, tuple | list) and any(isinstance(part, nn.Module) for part in build):
        raise ValueError(
            "simulate: build is what build() returned. Leave out its parentheses, so that the "
            "model is made inside of the simulation: simulate(build, step)."
        )
    if not callable(build):
        raise ValueError(
            f"simulate: build is {short(build)}{was_called(build)}. It must be a function without "
            f"arguments: {BUILD}."
        )
    if wanted := needed(build):
        words = ", ".join(wanted)
        raise ValueError(
            f"simulate: build needs {words}, and it is called without arguments. Put them in: "
            f"simulate(lambda: build({words}), step)."
        )


def look_at_step(where: str, step: Any, names: tuple[str, ...]) -> None:
    """Refuse a step that cannot be called as `step(model, optimizer)`.

    Raises:
        ValueError: with the line that was meant.
    """
    right = f"def step({', '.join(names)}): ..."
    if isinstance(step, type):
        raise ValueError(f"{where}: step is {short(step)}. It must be a function: {right}.")
    if isinstance(step, nn.Module):
        raise ValueError(
            f"{where}: step is a model, {type(step).__name__}. It must be a function that runs one "
            f"step of it: {right}."
        )
    if not callable(step):
        raise ValueError(
            f"{where}: step is {short(step)}{was_called(step)}. It must be a function: {right}."
        )
    if not takes(step, len(names)):
        has = ", ".join(needed(step)) or "none"
        raise ValueError(
            f"{where}: step is called with {', '.join(names)}, and its arguments are {has}. Write "
            f"{right}, and use these inside of it, not those of the notebook."
        )


def look_at_machine(where: str, given: dict[str, Any]) -> None:
    """Refuse devices of this machine, and worlds that are none.

    Raises:
        ValueError: with the line that was meant.
    """
    device, world = given.get("device", ""), given.get("world", 1)
    is_here = isinstance(device, str) and device.strip().lower().split(":")[0] in ("cuda", "gpu")
    if is_here or not isinstance(device, str):
        what = str(device) if isinstance(device, torch.device) else short(device)
        raise ValueError(
            f"{where}: device is {what}. A simulation runs on no device of this machine: name the "
            'one to simulate, device="A100 80GB", or device="cpu".'
        )
    if isinstance(world, str):
        number = world.strip() if world.strip().isdecimal() else "8"
        raise ValueError(
            f"{where}: world is {world!r}, a text. It must be how many devices there are: "
            f"world={number}."
        )
    if isinstance(world, int | float) and world > LARGEST_WORLD:
        raise ValueError(
            f"{where}: world is {short(world)}; the largest that is simulated has {LARGEST_WORLD:,}."
        )


def without_optimizer(error: AttributeError) -> str:
    """What to say where a step asked None for what an optimizer has; "" where it did not."""
    if error.obj is not None or not hasattr(torch.optim.Optimizer, str(error.name)):
        return ""
    return (
        f"simulate: build() returns the model alone, so step(model, optimizer) gets None, and asks it "
        f"for .{error.name}. Return both: {BUILD}."
    )


def _said(build: Any) -> str:
    if isinstance(build, nn.Module):
        return f"a model, {type(build).__name__}"
    if callable(build):
        return f"a function of ({', '.join(needed(build))})"
    return f"{short(build)}{was_called(build)}"


def _build() -> None: ...


def _build_at(layers: int) -> None: ...


def _step(model: Any, optimizer: Any) -> None: ...
