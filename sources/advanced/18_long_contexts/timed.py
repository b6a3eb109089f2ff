"""A ring whose pieces take as long as their pairs of query and key say, so that waiting can be seen on few cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checked import check_public

from .pieces import attend_piece

__all__ = ["SlowPieces", "Span", "pairs_of", "slowed"]


class Span(NamedTuple):
    """One piece of attention on one rank.

    Attributes:
        start, end: in seconds from when all ranks began.
        pairs: of query and key that it computed.
    """

    start: float
    end: float
    pairs: int


def pairs_of(queries: int, keys: int, causal: bool) -> int:
    """Pairs of a query and a key it sees; causal: query i sees keys 0 to i."""
    return queries * (queries + 1) // 2 if causal else queries * keys


class SlowPieces:
    """`attend_piece` that sleeps first, for a time in proportion to its pairs.

    A process that sleeps needs no core, so that four of them behave as four devices.

    Args:
        pair_seconds: of one pair of query and key, all heads together.

    Attributes:
        spans: of each call.
    """

    def __init__(self, pair_seconds: float) -> None:
        self.spans: list[Span] = []
        self.began = time.monotonic()
        self._pair_seconds = pair_seconds

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """As `attend_piece`, after a sleep."""
        start = time.monotonic() - self.began
        pairs = pairs_of(q.shape[2], k.shape[2], causal)
        time.sleep(self._pair_seconds * pairs)
        found = attend_piece(q, k, v, causal)
        self.spans.append(Span(start, time.monotonic() - self.began, pairs))
        return found


def slowed(
    forward: Callable[..., Any], zigzag: bool, length: int, seconds: float, rounds: int = 3
) -> list[list[Span]]:
    """On every rank: the spans of each round of `forward(q, kv, zigzag, piece=...)`.

    Args:
        forward: of a ring; takes this rank's part.
        zigzag: the layout.
        length: tokens of the whole sequence.
        seconds: that a rank takes with its full share of queries against as many keys.
        rounds: how often.
    """
    if not dist.is_initialized():
        raise RuntimeError("slowed() runs on ranks: start it by run_ranks.")
    own, found = length // dist.get_world_size(), list[list[Span]]()
    q, kv = torch.zeros(1, 1, own, 8), torch.zeros(2, 1, 1, own, 8)
    for _ in range(rounds):
        dist.barrier()
        piece = SlowPieces(seconds / own**2)
        forward(q, kv, zigzag, piece=piece)
        found.append(piece.spans)
    return found


check_public(globals())
