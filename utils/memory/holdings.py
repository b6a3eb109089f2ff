"""`reachable_storages`: every tensor storage that some objects keep alive, with the path that leads to it.

Frameworks keep flat buffers, shards and copies in attributes of their own. A walk over all of them
finds the same bytes as the allocator counts, and gives each a name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from utils.units import format_bytes

if TYPE_CHECKING:  # what has no shards is measured without torch.distributed
    from torch.distributed.tensor import DTensor


class ReachableStorage(NamedTuple):
    """One storage: the shortest path to a tensor in it, that tensor's type, all of its bytes."""

    path: str
    dtype: str
    bytes: int

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes):>12}  {self.dtype:<9} {self.path}"


def reachable_storages(**roots: Any) -> tuple[ReachableStorage, ...]:
    """The storages that can be reached from `roots`, largest first, each once.

    Follows attributes, containers and gradients: `reachable_storages(model=model, optimizer=optimizer)`. Tensors
    without memory (on the meta device, or resized to nothing) are left out.
    """
    found: dict[int, ReachableStorage] = {}
    for path, tensor in _tensors(roots):
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" and storage.nbytes():
            name = str(tensor.dtype).removeprefix("torch.")
            found.setdefault(storage.data_ptr(), ReachableStorage(path, name, storage.nbytes()))
    return tuple(sorted(found.values(), key=lambda row: -row.bytes))


def tensors_of(name: str, holder: Any) -> list[torch.Tensor]:
    """Every tensor that can be reached from an object, by attributes, containers and gradients."""
    return [tensor for _, tensor in _tensors({name: holder})]


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it reports the size of the whole, and `to_local` gives this rank's part."""
    return hasattr(tensor, "to_local")


def _tensors(roots: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: dict[int, Any] = {}  # kept alive: the id of an object that is gone is used again
    waiting = deque(roots.items())  # by breadth: the first path to a tensor is a shortest one
    while waiting:
        path, found = waiting.popleft()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, torch.Tensor) and not is_sharded(found):
            if found.layout is torch.strided:
                yield path, found
        waiting.extend(_inside(path, found))


def _inside(path: str, found: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(found, torch.Tensor):
        if is_sharded(found):
            yield path, found.to_local().detach()
        if found.is_leaf and found.grad is not None:
            yield f"{path}.grad", found.grad
    if isinstance(found, Mapping):
        for key, value in list(found.items()):
            name = repr(key) if isinstance(key, (str, int)) else type(key).__name__
            yield f"{path}[{name}]", value
    elif isinstance(found, (list, tuple, set, frozenset, deque)):
        for number, value in enumerate(list(found)):
            yield f"{path}[{number}]", value
    elif not isinstance(found, (type, ModuleType)):
        for name, value in list(getattr(found, "__dict__", {}).items()):
            yield f"{path}.{name}", value
