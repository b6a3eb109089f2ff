"""The memory of a simulated device and of its host: which storages are alive, since when.

A tensor without data owns a storage all the same, which lives and dies exactly as a real one does.
Those on the device become allocation events, on a clock that counts events; those on the host are
summed up.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from utils.memory.events import AllocationEvent
from utils.memory.host import on_host
from utils.memory.source import rounded
from utils.shims.torch_ import storage_key
from utils.simulation.cuda_allocator import replayed

WORKSPACE_ADDRESS = -1  # no storage has it
KEPT_ADDRESS = -2  # and those below
DEVICE, HOST = "device", "host"  # where a tensor may be put


class SimulatedMemory:
    """Events of all storages that it is told of.

    `granularity_bytes` is the simulated allocator's. `has_host`: the device has a host with memory
    of its own. `forget` is called with the key of each storage that is gone.
    """

    def __init__(
        self, granularity_bytes: int, has_host: bool, forget: Callable[[int], None]
    ) -> None:
        self.granularity_bytes, self._has_host = granularity_bytes, has_host
        self._forget = forget
        self.tells_apart = False  # whether the program puts tensors on device and host by name
        self.offloads = False  # whether FSDP keeps shards on the host, by whatever name
        self._placing: str | None = None
        self._on_host: dict[int, tuple[int, Any]] = {}
        self._host_bytes = self.host_peak_bytes = 0
        self.alive_bytes = self.peak_bytes = 0
        self._clock = 0
        self._alive: dict[int, tuple[int, Any]] = {}
        self._events: list[AllocationEvent] = []
        self._kept: list[tuple[int, int]] = []
        self._reserved: tuple[int, int] | None = None  # after so many events, so many bytes
        self.existing: list[tuple[int, int]] = []  # address and bytes, when the recording began

    def start(self) -> None:
        """Begin to record."""
        self._events, self._reserved = [], None
        self.host_peak_bytes = self._host_bytes
        alive = [(address, size) for address, (size, _) in self._alive.items()]
        self.existing = alive + self._kept

    def now_ns(self) -> int:
        """The number of events so far."""
        self._clock += 1
        return self._clock

    def stop(self) -> list[AllocationEvent]:
        """What was recorded."""
        return self._events

    def address(self, storage: torch.UntypedStorage) -> int | None:
        """What stands in for an address: fake storages have no data pointer."""
        key = storage_key(storage)
        return None if key in self._on_host else key

    def note(self, storage: torch.UntypedStorage) -> None:
        """Record a storage that is seen for the first time."""
        self.note_at(storage, self._has_host and self._goes_to_host((), {}))

    @contextlib.contextmanager
    def placing(self, where: str | None) -> Iterator[None]:
        """Inside, what is made goes to `DEVICE` or `HOST`; None leaves that to the program."""
        before, self._placing = self._placing, where or self._placing
        try:
            yield
        finally:
            self._placing = before

    @contextlib.contextmanager
    def offloading(self) -> Iterator[None]:
        """Inside, FSDP makes shards on the host; what is made of them alone stays there from now on."""
        self.offloads = True
        with self.placing(HOST):
            yield

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor without data is in host memory."""
        is_dense = tensor.layout is torch.strided
        return is_dense and storage_key(tensor.untyped_storage()) in self._on_host

    def all_on_host(self) -> None:
        """From here on device and host are told apart, and what there is was made on the host."""
        self.tells_apart = True
        for address, (size, guard) in list(self._alive.items()):
            storage, *_ = guard.detach()
            del self._alive[address]
            self._record(address, -size)
            self._note_on_host(storage)

    def all_on_device(self) -> None:
        """The inverse of `all_on_host`."""
        self.tells_apart = False
        for key, (_size, guard) in list(self._on_host.items()):
            storage, *_ = guard.detach()
            self._host_died(key)
            self.note_at(storage, False)
        self.host_peak_bytes = self._host_bytes

    def reset_peak(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats()`."""
        self.peak_bytes = self.alive_bytes

    @property
    def reserved_bytes(self) -> int:
        """What CUDA's caching allocator would have reserved so far, since the recording began."""
        events = len(self._events)
        if self._reserved is None or self._reserved[0] != events:
            found = replayed(self.existing, self._events).reserved_bytes
            self._reserved = (events, found)
        return self._reserved[1]

    def _goes_to_host(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any] | None = None
    ) -> bool:
        """Whether results are made in host memory: by an order, else where their arguments are.

        `tensors` are those among the arguments, where they are known already.
        """
        if on_host():
            return True
        if self._placing is not None or not (self.tells_apart or self.offloads):
            return self._placing == HOST
        leaves = tensors
        if leaves is None:
            leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        # What PyTorch itself makes inside of a function, it makes where it computes.
        return bool(leaves) and all(map(self.is_on_host, leaves))

    def note_at(self, storage: torch.UntypedStorage, to_host: bool) -> None:
        """The same, where it is known in which memory the storage is."""
        address = storage_key(storage)
        if address in self._alive or address in self._on_host:
            return
        if to_host:
            return self._note_on_host(storage)
        size = rounded(storage.nbytes(), self.granularity_bytes)
        guard = weakref.finalize(storage, self._died, address)
        guard.atexit = False
        self._alive[address] = (size, guard)
        self._record(address, size)
        return None

    def _note_on_host(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        guard = weakref.finalize(storage, self._host_died, key)
        guard.atexit = False
        self._on_host[key] = (size, guard)
        self._host_bytes += size
        self.host_peak_bytes = max(self.host_peak_bytes, self._host_bytes)

    def _host_died(self, key: int) -> None:
        self._host_bytes -= self._on_host.pop(key)[0]
        self._forget(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage changed its size in place, as FSDP's parameters do."""
        address = storage_key(storage)
        old = self._alive.get(address)
        if old is None:
            return self.note(storage)
        size = rounded(storage.nbytes(), self.granularity_bytes)
        if size != old[0]:
            self._record(address, -old[0])
            self._record(address, size)
            self._alive[address] = (size, old[1])
        return None

    def workspace(self, size_bytes: int) -> None:
        """Record memory that a kernel takes and gives back before it returns."""
        size = rounded(size_bytes, self.granularity_bytes)
        self._record(WORKSPACE_ADDRESS, size)
        self._record(WORKSPACE_ADDRESS, -size)

    def keep(self, size_bytes: int) -> None:
        """Record memory that a library takes and never gives back."""
        if size_bytes:
            self._kept.append((KEPT_ADDRESS - len(self._kept), size_bytes))
            self._record(*self._kept[-1])

    def _died(self, address: int) -> None:
        size, _ = self._alive.pop(address)
        self._forget(address)
        self._record(address, -size)

    def _record(self, address: int, size: int) -> None:
        if size:
            self.alive_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
            self._clock += 1
            self._events.append(AllocationEvent(self._clock, address, size))
