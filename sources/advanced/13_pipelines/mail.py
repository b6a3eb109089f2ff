"""Messages between the stages of a pipeline, over gloo."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checked import check_public

__all__ = ["Mail"]


class Mail:
    """What a rank's stages give each other and other ranks: activations forward, gradients back.

    A send goes on at once. A receive waits for the message of its own tag: of a border between two
    stages, a direction and a micro-batch. What stays on the rank is not sent.

    Attributes:
        limit: how long a message is waited for.
    """

    def __init__(self, owners: Mapping[int, int], like: Tensor, seconds: float = 30) -> None:
        """`owners` says the rank of each stage, `like` is a tensor of a message's shape and dtype."""
        self.owners, self.like = owners, like
        self.limit = datetime.timedelta(seconds=seconds)
        self._here: dict[int, Tensor] = {}
        self._sent: list[dist.Work] = []

    def put(self, tensor: Tensor, source: int, target: int, k: int) -> None:
        """Hand micro-batch k's tensor from one stage to the next one, or to the one before."""
        tag = _tag(source, target, k)
        if self.owners.get(target) == dist.get_rank():
            self._here[tag] = tensor
        elif target in self.owners:  # nobody stands before stage 0
            self.send(tensor.contiguous(), self.owners[target], tag)

    def take(self, source: int, target: int, k: int) -> Tensor:
        """What stage `source` has put for stage `target`."""
        tag = _tag(source, target, k)
        if self.owners[source] == dist.get_rank():
            return self._here.pop(tag)
        tensor = torch.empty_like(self.like)
        self.receive(tensor, self.owners[source], tag)
        return tensor

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Send without waiting for the receiver."""
        self._sent.append(_started(dist.isend(tensor, rank, tag=tag)))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Wait until the message is in `tensor`.

        Raises:
            RuntimeError: it does not come in time.
        """
        _started(dist.irecv(tensor, rank, tag=tag)).wait(self.limit)

    def close(self) -> None:
        """Wait until all was fetched: a message dropped before breaks the connection."""
        for work in self._sent:
            work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    """PyTorch returns None where this process is not in the group."""
    if work is None:
        raise RuntimeError(
            "Mail runs on ranks of the default process group: start it by run_ranks."
        )
    return work


def _tag(source: int, target: int, k: int) -> int:
    """Of a border, a direction, a micro-batch."""
    return 1000 * (2 * max(source, target) + (source < target)) + k


check_public(globals())
