"""How far a nudge of all weights carries a training of one process, with a kink and without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

from utils.models import small_resnet

from .training import largest_difference

__all__ = ["nudged_differences"]

BATCH, STEPS, SIZE = 64, 24, 1e-7


def nudged_differences(data: TensorDataset, seeds: Sequence[int]) -> dict[str, list[float]]:
    """By activation: for each nudge, the largest relative difference of losses in 24 steps.

    Each weight is multiplied by 1 + 1e-7 times a normal number of that seed; fp64, width 8.
    """
    found = {}
    for name, activation in (("ReLU", F.relu), ("softplus", F.softplus)):
        with _Activation(activation):
            plain = _losses(data)
            found[name] = [largest_difference(_losses(data, n), plain, STEPS) for n in seeds]
    return found


class _Activation(TorchFunctionMode):
    """While it is open, another function stands wherever a model calls `F.relu`."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.relu:
            return self.activation(args[0])
        return func(*args, **(kwargs or {}))


def _losses(data: TensorDataset, seed: int | None = None) -> list[float]:
    torch.manual_seed(0)
    model = small_resnet(width=8).double()
    if seed is not None:
        numbers = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
            parameter.data *= 1 + SIZE * drawn
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    images, labels = (part[order] for part in data.tensors)
    losses = []
    for part in zip(images.split(BATCH)[:STEPS], labels.split(BATCH), strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(part[0].double()), part[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
