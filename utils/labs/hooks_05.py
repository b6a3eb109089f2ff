"""How the check of lab 05 looks at a checkpoint by hand: gradients, random state, what stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from utils.memory import measure


class Noisy(nn.Module):
    """Linear layers with dropout: keeps three tensors a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3)
        return x


def noisy_gradients(function: Any, model: nn.Module, x: Tensor) -> tuple[list[Any], Tensor]:
    """The result and the gradients, and the random state that backward leaves."""
    torch.manual_seed(4)
    out = function(model, x)
    torch.rand(3)  # somebody else draws between forward and backward
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())], torch.get_rng_state()


def kept_bytes(function: Any, model: nn.Module, x: Tensor) -> int:
    """Bytes alive when forward is over, beside the model."""
    model.zero_grad()
    held: list[Tensor] = []

    def step() -> None:
        held[:] = [function(model, x)]

    found = measure(step, model=model, timed_steps=0)
    alive = found.timeline.at(found.timeline.end_ns)
    return alive.total_bytes - alive.state_bytes


@contextlib.contextmanager
def calls_of_torch_s_own(function: Any) -> Iterator[list[int]]:
    """Inside, a call of `torch.utils.checkpoint.checkpoint` is noted, under whatever name."""
    real, calls = torch.utils.checkpoint.checkpoint, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    scope = getattr(function, "__globals__", {})
    names = [name for name, value in scope.items() if value is real]
    scope.update(dict.fromkeys(names, noted))
    try:
        with mock.patch.object(torch.utils.checkpoint, "checkpoint", noted):
            yield calls
    finally:
        scope.update(dict.fromkeys(names, real))
