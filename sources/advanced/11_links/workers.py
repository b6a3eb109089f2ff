"""What the checks of lab 11 run on ranks: the learner's collectives, with every message noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.traffic.counter import traffic

from .wire import Move, Wire

HELPERS = frozenset({"send", "receive"})  # kinds of traffic that a wire makes


class Sent(NamedTuple):
    """One rank after the learner's collective.

    Attributes:
        moves: What it did over the wire.
        share: Of the right numbers, those that its tensor holds: 1.0 where all are right.
        is_own: Its tensor still holds what it held before.
        returned: The result is the tensor itself, or nothing was returned.
        elsewhere: Kinds of collectives that it called beside the wire.
    """

    moves: list[Move]
    share: float
    is_own: bool
    returned: bool
    elsewhere: list[str]


def ring(answer: Callable[..., Any], host_of: Sequence[int], numbers: int) -> Sent:
    """Exercise 1, on every rank."""
    ranks = range(dist.get_world_size())
    right = sum(
        (_numbers(rank, numbers) for rank in ranks), torch.zeros(numbers, dtype=torch.float64)
    )
    return _sent(lambda wire, tensor: answer(wire, tensor, list(host_of)), right)


def broadcast(answer: Callable[..., Any], root: int, numbers: int) -> Sent:
    """Exercise 2, on every rank."""
    return _sent(lambda wire, tensor: answer(wire, tensor, root), _numbers(root, numbers))


def _sent(run: Callable[[Wire, torch.Tensor], Any], right: torch.Tensor) -> Sent:
    own = _numbers(dist.get_rank(), len(right))
    tensor, wire = own.clone(), Wire()
    with traffic() as sent:
        result = run(wire, tensor)
    share = torch.isclose(tensor, right, rtol=1e-9).double().mean().item()
    elsewhere = sorted({row.collective for row in sent.rows} - HELPERS)
    calls = sum(row.calls for row in sent.rows if row.collective == "send")
    if calls > sum(move.to is not None for move in wire.moves):
        elsewhere.append("send without the wire")
    return Sent(
        list(wire.moves),
        share,
        torch.equal(tensor, own),
        result is None or result is tensor,
        elsewhere,
    )


def _numbers(rank: int, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(count, dtype=torch.float64, generator=random)
