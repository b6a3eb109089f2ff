"""What the checks of lab 04 run on ranks: the learner's functions on small models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.traffic.counter import traffic

TOKENS = [[2, 9, 4], [6, 1, 3]]  # of each rank's micro-batches
VOCABULARY = 5


class ByHand(NamedTuple):
    """One rank of exercise 1: its model before and after the start, gradients, all-reduces."""

    own_parameters: Tensor
    parameters: Tensor
    buffers: Tensor
    own_gradient: Tensor
    gradient: Tensor
    right: Tensor
    reduces: int


class Accumulated(NamedTuple):
    """One rank of exercise 4: the gradient, what right and wrong rules give, and the largest forward."""

    gradient: Tensor
    right: Tensor
    by_micro_batch: Tensor
    by_rank: Tensor
    gradient_calls: int
    payload_bytes: int
    most_tokens: int


class Shifted(nn.Module):
    """Two layers and a buffer between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("shift", torch.full((8,), float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) -> (rows, 3)."""
        return self.second(torch.tanh(self.first(x) + self.shift))


def close(left: Tensor, right: Tensor) -> bool:
    """Equal but for rounding."""
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-6)


def by_hand(start: Callable[..., Any], average: Callable[..., Any]) -> ByHand:
    """Exercise 1, on every rank."""
    model = Shifted(seed=dist.get_rank())
    own = _flat(model.parameters())
    start(model)
    parameters, buffers = _flat(model.parameters()), _flat(model.buffers())
    torch.manual_seed(100)
    rows = 4 * dist.get_world_size()
    inputs, targets = torch.randn(rows, 6), torch.randint(3, (rows,))
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    F.cross_entropy(model(inputs[mine]), targets[mine]).backward()
    own_gradient = _gradient(model)
    with traffic() as sent:
        average(model)
    reduces = sum(row.calls for row in sent.rows if row.collective == "all-reduce")
    whole = Shifted(seed=0)
    F.cross_entropy(whole(inputs), targets).backward()
    return ByHand(
        own, parameters, buffers, own_gradient, _gradient(model), _gradient(whole), reduces
    )


def micro_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs (tokens, 6) and targets (tokens,) of each of a rank's micro-batches."""
    torch.manual_seed(rank)
    return [(torch.randn(n, 6), torch.randint(VOCABULARY, (n,))) for n in TOKENS[rank]]


def accumulated(function: Callable[..., Any]) -> Accumulated:
    """Exercise 4, on every rank."""
    layer, rows = _layer(), [0]
    layer.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    model = DistributedDataParallel(layer)
    with traffic() as sent:
        function(model, micro_batches(dist.get_rank()))
    gradient_bytes = _flat(model.parameters()).nbytes
    calls = sum(row.payload_bytes == gradient_bytes for row in sent.collectives)
    ranks = range(dist.get_world_size())
    total = sum(map(sum, TOKENS))
    parts = [len(ranks) * len(tokens) for tokens in TOKENS]
    return Accumulated(
        _gradient(model.module),
        _weighted(lambda rank, part: 1 / total),
        _weighted(lambda rank, part: 1 / TOKENS[rank][part] / parts[rank]),
        _weighted(lambda rank, part: 1 / sum(TOKENS[rank]) / len(ranks)),
        calls,
        sent.payload_bytes,
        max(rows),
    )


def report(function: Callable[[Tensor], float], empty: tuple[int, ...]) -> float:
    """Exercise 5, on every rank: its loss is its number plus one; those in `empty` have a NaN."""
    rank = dist.get_rank()
    return function(torch.tensor(math.nan if rank in empty else rank + 1.0))


def _weighted(weight: Callable[[int, int], float]) -> Tensor:
    """The gradient if each token of a rank's micro-batch has this weight."""
    layer = _layer()
    for rank in range(len(TOKENS)):
        for part, (inputs, targets) in enumerate(micro_batches(rank)):
            loss = F.cross_entropy(layer(inputs), targets, reduction="sum")
            (loss * weight(rank, part)).backward()
    return _gradient(layer)


def _layer() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(6, VOCABULARY)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


def _gradient(model: nn.Module) -> Tensor:
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return _flat(found)
