"""The small network of lesson 03, of blocks whose norm the lesson chooses, and the gradients between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

FEATURES, WIDTH, INNER, CLASSES = 32, 64, 128, 8


class Block(nn.Module):
    """A norm and two linear layers beside a residual."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) -> (rows, WIDTH)."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """(rows, FEATURES) -> (rows, CLASSES), the same first weights each time.

    Args:
        norm: makes a norm over that many features.
    """
    torch.manual_seed(0)
    first, blocks = nn.Linear(FEATURES, WIDTH), [Block(norm) for _ in range(2)]
    return nn.Sequential(first, *blocks, norm(WIDTH), nn.Linear(WIDTH, CLASSES))


def passed_back(
    model: nn.Sequential, loss_of: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor
) -> torch.Tensor:
    """All gradients that come back to the outputs of a model's layers in one step, in one row."""
    found: list[torch.Tensor] = []

    def watch(module: nn.Module, given: object, out: torch.Tensor) -> None:
        out.register_hook(lambda gradient: found.append(gradient.flatten()))

    hooks = [layer.register_forward_hook(watch) for layer in model]
    loss_of(model(inputs)).backward()
    for each in hooks:
        each.remove()
    return torch.cat(found)
