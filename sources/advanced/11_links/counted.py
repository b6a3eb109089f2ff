"""The course's collectives beside gloo's: the largest difference, and who sent what."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import algorithms
from .wire import Move, Wire

ROWS, COLUMNS = 64, 8


class Beside(NamedTuple):
    """One collective on one rank: how far from gloo's, relative to the largest, and its messages."""

    apart: float
    moves: list[Move]


def beside_gloo(numbers: int = ROWS * COLUMNS) -> dict[str, Beside]:
    """On a rank: four collectives over `numbers` doubles, which the ranks must divide.

    That is the whole tensor: an all-gather takes a rank's share of it from each.
    """
    ranks = dist.get_world_size()
    x = torch.randn(
        numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    shard = x[: numbers // ranks]
    return {
        "all-gather": _beside(
            algorithms.ring_all_gather,
            shard,
            lambda to: dist.all_gather_into_tensor(to, shard),
            numbers,
        ),
        "reduce-scatter": _beside(
            algorithms.ring_reduce_scatter,
            x,
            lambda to: dist.reduce_scatter_tensor(to, x.clone()),
            numbers // ranks,
        ),
        "all-to-all": _beside(
            algorithms.all_to_all, x, lambda to: dist.all_to_all_single(to, x), numbers
        ),
        "all-reduce, tree": _beside(
            algorithms.tree_all_reduce, x, lambda to: dist.all_reduce(to.copy_(x)), numbers
        ),
    }


def _beside(
    ours: Callable[[Wire, Tensor], Tensor],
    x: Tensor,
    gloos: Callable[[Tensor], object],
    numbers: int,
) -> Beside:
    wire, expected = Wire(), torch.empty(numbers, dtype=x.dtype)
    found = ours(wire, x.clone())
    gloos(expected)
    apart = (found.flatten() - expected).abs().max() / expected.abs().max()
    return Beside(apart.item(), list(wire.moves))
