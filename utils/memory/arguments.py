"""The mistakes that everybody makes first with `measure`: what was meant, and the right line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from utils.checked import short
from utils.memory.watched import watched

RIGHT = "measure(step, model=model, optimizer=optimizer)"


def refuse_known_mistakes(given: dict[str, Any]) -> None:
    """Look at what `measure` was given, before anything runs.

    Raises:
        ValueError: a known mistake, with the line that was meant.
    """
    if "step" in given:
        _look_at_step(given["step"])
    if "model" in given:
        _look_at_model(given["model"], given.get("optimizer"))
    if isinstance(given.get("optimizer"), type):
        raise ValueError(
            f"measure: optimizer is {short(given['optimizer'])}, not one of its objects. It must be "
            "a torch.optim optimizer that is made: "
            f"{given['optimizer'].__name__}(model.parameters())."
        )
    if "model" in given:
        watched(given["model"], given.get("optimizer"), given.get("keep"), given.get("host"))


def _look_at_step(step: Any) -> None:
    if isinstance(step, nn.Module):
        raise ValueError(
            f"measure: step is a model, {type(step).__name__}. It must be a function without "
            f"arguments that runs one step; the model has its own place: {RIGHT}."
        )
    if not callable(step):
        raise ValueError(
            f"measure: step is {short(step)}{was_called(step)}. It must be a function without "
            f"arguments that runs one training step: {RIGHT}."
        )
    if wanted := needed(step):
        words = ", ".join(wanted)
        raise ValueError(
            f"measure: step needs {words}, and it is called without arguments. Put them in: "
            f"measure(lambda: step({words}), model=model, optimizer=optimizer)."
        )


def _look_at_model(model: Any, optimizer: Any) -> None:
    if isinstance(model, torch.optim.Optimizer):
        raise ValueError(
            f"measure: model is an optimizer, {type(model).__name__}; model and optimizer are "
            f"swapped. Write {RIGHT}."
        )
    if isinstance(model, type) and issubclass(model, nn.Module):
        return  # `watched` has a sentence for it
    if isinstance(model, tuple | list) and any(
        isinstance(part, torch.optim.Optimizer) for part in model
    ):
        raise ValueError(
            "measure: model holds a model and its optimizer, as build() returns them. Take them "
            f"apart: model, optimizer = build(), then {RIGHT}."
        )


def was_called(value: Any) -> str:
    """A guess at how a value came where a function is wanted: its parentheses were written."""
    if value is None or isinstance(value, torch.Tensor | float | tuple):
        return ", perhaps what the function returned: leave out its parentheses"
    return ""


def needed(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function cannot be called without; [] where Python does not know."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with `count` arguments; True where Python does not know."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        return True
    return True
