"""Messages between ranks, noted in order: what collectives by hand are made of.

`Wire` sends and receives over torch.distributed and writes down what it did. `messages` puts the
notes of all ranks together and says in which step each message travelled, as in the one-port model
(Thakur, Rabenseifner and Gropp 2005, section 3): in one step a rank sends one message and
receives one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checked import check_public

__all__ = ["Wire", "messages"]

Pace = Callable[[int, int], None]  # called with a global rank and bytes, before they are sent to it
# By source and target: step, bytes, and where they lay.
_UnderWay = dict[tuple[int, int], deque[tuple[int, int, int]]]


class Move(NamedTuple):
    """What one rank did: sent `sent_bytes` to `to`, received from `source`, or both at once.

    What it sent lay `at_byte` bytes from the start of its tensor's storage.
    """

    to: int | None
    sent_bytes: int
    source: int | None
    at_byte: int = 0


class Message(NamedTuple):
    """Bytes that travelled from rank `source` to rank `target` in one step, counted from 1."""

    step: int
    source: int
    target: int
    bytes: int
    at_byte: int = 0


class Wire:
    """This rank's way to the others, for a worker of `run_ranks` or `run_hosts`.

    Attributes:
        rank: This rank's place among those that the wire joins.
        size: How many it joins.
        hosts: Machines that the ranks lie on, in equal blocks of neighbouring ranks.
        moves: What this rank did, in order, with global numbers of ranks.
    """

    def __init__(self, *, hosts: int = 1, pace: Pace | None = None) -> None:
        """Join all ranks.

        Raises:
            ValueError: there is no process group, or the ranks do not divide over the hosts.
        """
        if not dist.is_initialized():
            raise ValueError(
                "There is no process group here: make a Wire in a worker of run_ranks."
            )
        self._ranks = list(range(dist.get_world_size()))
        if len(self._ranks) % hosts:
            raise ValueError(
                f"{len(self._ranks)} ranks do not divide over {hosts} hosts: take a multiple of {hosts}."
            )
        self.rank, self.size, self.hosts = dist.get_rank(), len(self._ranks), hosts
        self.moves: list[Move] = []
        self._pace = pace

    def among(self, ranks: Sequence[int]) -> Wire:
        """A wire that joins some of these ranks, this one included; moves go into the same list.

        Raises:
            ValueError: this rank is not one of them, or there is no such rank.
        """
        if self.rank not in ranks or not set(ranks) <= set(range(self.size)):
            raise ValueError(f"Rank {self.rank} of {self.size} cannot join ranks {list(ranks)}.")
        part = object.__new__(Wire)
        part._ranks = [self._ranks[rank] for rank in ranks]
        part.rank, part.size, part.hosts = list(ranks).index(self.rank), len(ranks), 1
        part.moves, part._pace = self.moves, self._pace
        return part

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to a rank, and wait until it has left."""
        self._post(tensor, to, None).wait()

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Wait for a tensor from a rank, of the shape and type of `like`."""
        self.moves.append(Move(None, 0, self._number(source)))
        return self._receive(like, source)

    def exchange(self, tensor: Tensor, to: int, source: int, like: Tensor | None = None) -> Tensor:
        """Send to one rank while receiving from another, or the same: one step.

        Args:
            tensor: what is sent.
            to: who gets it.
            source: whose tensor is returned.
            like: what it looks like; as `tensor` if left out.
        """
        work = self._post(tensor, to, source)
        received = self._receive(tensor if like is None else like, source)
        work.wait()
        return received

    def _post(self, tensor: Tensor, to: int, source: int | None) -> dist.Work:
        target = self._number(to)
        came_from = None if source is None else self._number(source)
        at_byte = int(tensor.storage_offset()) * tensor.element_size()
        self.moves.append(Move(target, tensor.nbytes, came_from, at_byte))
        if self._pace:
            self._pace(target, tensor.nbytes)
        work = dist.isend(tensor.contiguous(), target)
        assert work is not None  # as long as this rank is in the group
        return work

    def _receive(self, like: Tensor, source: int) -> Tensor:
        into = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(into, self._number(source))
        return into

    def _number(self, rank: int) -> int:
        if not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(
                f"Rank {self.rank} of {self.size} cannot talk to rank {rank}: the others are 0 to "
                f"{self.size - 1}. Take the remainder (% wire.size) where a ring closes."
            )
        return self._ranks[rank]


def messages(moves: Sequence[Sequence[Move]]) -> list[Message]:
    """All messages by step, from the moves of every rank.

    A message leaves in the step after its sender's last; it arrives in that step, or in the first
    in which its receiver receives nothing else.

    Raises:
        ValueError: a rank waits for a message that nobody sends, or one is never received.
    """
    left = [deque(each) for each in moves]
    clocks = [0] * len(moves)
    under_way: _UnderWay = {}
    found: list[Message] = []
    before = None
    while before != (now := (sum(map(len, left)), sum(map(len, under_way.values())))):
        before = now
        for rank, todo in enumerate(left):
            while todo and _advance(rank, todo, clocks, under_way, found):
                todo.popleft()
    _check_all_met(left, under_way)
    return sorted(found)


def _advance(
    rank: int, todo: deque[Move], clocks: list[int], under_way: _UnderWay, found: list[Message]
) -> bool:
    """Do what can be done of a rank's next move; whether all of it is done."""
    to, size, source, at_byte = todo[0]
    if to is not None:
        under_way.setdefault((rank, to), deque()).append((clocks[rank] + 1, size, at_byte))
        todo[0] = Move(None, 0, source)  # sent; what is left of it is to receive
    if source is None:
        clocks[rank] += 1
        return True
    waiting = under_way.get((source, rank))
    if not waiting:
        return False
    step, size, at_byte = waiting.popleft()
    clocks[rank] = max(clocks[rank] + 1, step)
    found.append(Message(clocks[rank], source, rank, size, at_byte))
    return True


def _check_all_met(left: Sequence[deque[Move]], under_way: _UnderWay) -> None:
    for rank, todo in enumerate(left):
        if todo:
            raise ValueError(
                f"Rank {rank} waits for a message that rank {todo[0].source} never sends."
            )
    for (source, target), waiting in under_way.items():
        if waiting:
            raise ValueError(f"Rank {source} sent rank {target} a message that it never received.")


check_public(globals())
