"""`traffic`: what this rank communicates while a block runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from utils.shims.torch_distributed import group_named
from utils.traffic.collectives import Collective, Traffic, collectives_of, summed


class Sent:
    """The collectives of one block of code on this rank, in order."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []

    @property
    def rows(self) -> tuple[Traffic, ...]:
        """Calls and payload bytes by kind, group and element type."""
        return summed(self.collectives)

    @property
    def payload_bytes(self) -> int:
        """All that this rank put in."""
        return sum(row.payload_bytes for row in self.collectives)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "nothing sent"


@contextmanager
def traffic() -> Iterator[Sent]:
    """Count the collectives that this rank takes part in, and the bytes it puts into them.

    For a worker of `run_ranks`: `with traffic() as sent: step()`, then `sent.rows`. Payload is
    what enters the collective; `Traffic` says what a ring makes of it. Barriers carry none and are
    not counted.

    Raises:
        ValueError: there is no process group.
        UnknownOperation: inside, at an operation whose bytes the counter cannot tell.
    """
    if not dist.is_initialized():
        raise ValueError("There is no process group here: use traffic() in a worker of run_ranks.")
    sent = Sent()
    with _Counter(sent):
        yield sent


class _Counter(TorchDispatchMode):
    def __init__(self, sent: Sent) -> None:
        super().__init__()
        self._sent = sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the collectives on its local tensors
        self._sent.collectives += collectives_of(func, args, time.monotonic_ns(), _name_of)
        return func(*args, **(kwargs or {}))


def _name_of(group: dist.ProcessGroup | str) -> str:
    """A mesh axis where the group has such a name, else "world"."""
    found = group_named(group) if isinstance(group, str) else group
    if found.size() == dist.get_world_size():
        return "world"
    return found.group_desc if found.group_desc != "undefined" else found.group_name
