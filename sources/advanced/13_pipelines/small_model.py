"""The small model that lesson 13 cuts into stages, its batches, and one process that trains it whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LAYERS", "WholeRun", "batch", "farthest", "layers_of", "one_process"]

WIDTH, ROWS, LENGTH, LAYERS, MICRO_BATCHES = 64, 2, 16, 8, 8


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) -> the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def layers_of(stage: int, stages: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A stage's share of eight blocks; every rank draws the same weights for all."""
    torch.manual_seed(0)
    layers, each = [Block() for _ in range(LAYERS)], LAYERS // stages
    return nn.Sequential(*layers[stage * each : (stage + 1) * each]).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of eight micro-batches, (2, 16, 64) each."""
    torch.manual_seed(1 + step)
    inputs, targets = (
        [size * torch.randn(ROWS, LENGTH, WIDTH).to(dtype) for _ in range(MICRO_BATCHES)]
        for size in (1, 8)
    )
    return inputs, targets


class WholeRun(NamedTuple):
    """Losses by step, and the gradient of the last step as one vector."""

    losses: list[float]
    gradient: Tensor


def one_process(steps: int, clip_by_first: int = 0, dtype: torch.dtype = torch.float64) -> WholeRun:
    """Train the whole model, accumulating micro-batches.

    Args:
        steps: of SGD.
        clip_by_first: clip all gradients by the norm of so many first blocks, to 1; 0 for not at all.
        dtype: of weights and batches.
    """
    model, losses, last = layers_of(0, 1, dtype), [], torch.empty(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, y in zip(*batch(step, dtype), strict=True):
            loss = F.mse_loss(model(x), y) / MICRO_BATCHES
            loss.backward()
            losses[-1] += loss.item()
        last = gradient_of(model)
        if clip_by_first:
            norm = gradient_of(model[:clip_by_first]).norm()
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
    return WholeRun(losses, last)


def gradient_of(module: nn.Module) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def farthest(results: Iterable[Mapping[str, Any]], whole: WholeRun) -> tuple[float, float]:
    """How far the ranks' losses and last gradients are from one process, as shares.

    Args:
        results: of each rank "losses" by step, 0 where it has none, and "gradients" by stage.
        whole: what one process found.
    """
    ranks = [*results]
    losses = [max(found) for found in zip(*(rank["losses"] for rank in ranks), strict=True)]
    parts = {stage: part for rank in ranks for stage, part in rank["gradients"].items()}
    gradient = torch.cat([parts[stage] for stage in sorted(parts)])
    loss_gap = max(abs(a / b - 1) for a, b in zip(losses, whole.losses, strict=True))
    return loss_gap, ((gradient - whole.gradient).norm() / whole.gradient.norm()).item()
