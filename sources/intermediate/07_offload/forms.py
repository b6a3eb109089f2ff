"""A small model with one thing kept in host memory: its step, its link, and what lies on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from utils import Transformer

from .by_libraries import SMALL, whole_loss
from .link import Link
from .streaming import stream_blocks

__all__ = ["FORMS", "Form", "prepared"]

FORMS = ("plain", "optimizer, gradients", "activations", "blocks streamed")


class Form(NamedTuple):
    """A model that is ready to train.

    Attributes:
        model: with what it keeps on the device.
        optimizer: the one that steps.
        step: takes tokens and targets, and gives the loss.
        link: that what leaves goes over.
        on_host: what lies in host memory between two steps, by category.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor, Tensor], float]
    link: Link
    on_host: Callable[[], dict[str, Any]]


def prepared(
    form: str,
    host_adam: Callable[..., Any],
    activations_on_host: Callable[[Iterable[Tensor], Link], Any],
) -> Form:
    """The same small model from seed 0, with what `form` names in host memory.

    Args:
        form: one of `FORMS`.
        host_adam: the lesson's `HostAdamW`.
        activations_on_host: the lesson's function of that name.

    Raises:
        ValueError: there is no such form.
    """
    if form not in FORMS:
        raise ValueError(f"form={form!r}; write one of {', '.join(map(repr, FORMS))}.")
    torch.manual_seed(0)
    model: Any = Transformer(SMALL)
    link, streamed = Link(), []
    finish: Callable[[], None] = lambda: None  # noqa: E731
    around: Callable[[], Any] = contextlib.nullcontext
    if form == "blocks streamed":
        model.blocks, stream = stream_blocks(model.blocks, link)
        streamed, finish = list(model.blocks.parameters()), stream.finish
    if form == "activations":
        around = partial(activations_on_host, list(model.parameters()), link)
    offloads = form == "optimizer, gradients"
    optimizer: Any = (
        host_adam(model.parameters(), link, lr=1e-3)
        if offloads
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    inner = optimizer.inner if offloads else optimizer

    def step(tokens: Tensor, targets: Tensor) -> float:
        model.zero_grad()
        with around():
            loss = whole_loss(model, tokens, targets)
        loss.backward()
        finish()  # streamed gradients have arrived
        optimizer.step()
        return loss.item()

    def on_host() -> dict[str, Any]:
        states = inner if offloads else [inner.state[weight] for weight in streamed]
        return {"parameters": streamed, "optimizer state": states} if states else {}

    return Form(model, inner, step, link, on_host)
