"""What autograd keeps for backward, counted while it keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from utils.checked import check_public
from utils.shims.torch_ import storage_key

__all__ = ["SavedBytes", "saved_for_backward"]


@dataclass
class SavedBytes:
    """Bytes saved for backward: `live_bytes` now, `peak_bytes` at most; each storage counts once."""

    live_bytes: int = 0
    peak_bytes: int = 0
    _holders: dict[int, int] = field(default_factory=dict, repr=False)

    def hold(self, key: int, size: int) -> None:
        """A storage is saved once more."""
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, key: int, size: int) -> None:
        """A storage is saved once less."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live_bytes -= size


class _Kept:
    """What autograd keeps in place of a tensor; it dies when autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_for_backward(parameters: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Count what autograd saves inside, but for `parameters`, until it drops it.

    The count goes on after the block, until all that was saved in it is gone.
    """
    own, found = {storage_key(p.untyped_storage()) for p in parameters}, SavedBytes()

    def pack(tensor: Tensor) -> Tensor | _Kept:
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        if key in own:
            return tensor
        kept = _Kept(tensor)
        found.hold(key, size)
        weakref.finalize(kept, found.drop, key, size).atexit = False
        return kept

    def unpack(kept: Tensor | _Kept) -> Tensor:
        return kept.tensor if isinstance(kept, _Kept) else kept

    with saved_tensors_hooks(pack, unpack):
        yield found


check_public(globals())
