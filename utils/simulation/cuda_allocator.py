"""CUDA's caching allocator, replayed over a stream of requests: what it reserves from the device.

After c10/cuda/CUDACachingAllocator.cpp of github.com/pytorch/pytorch (read at eb42ad6; later
versions name the same sizes in c10/core/AllocatorConfig.h), default settings, one stream: requests
are multiples of 512 bytes; up to 1 MiB they come from segments of 2 MiB, below 10 MiB from
segments of 20 MiB, above from a segment of their own, a multiple of 2 MiB
(`get_allocation_size`). A request takes the smallest free block that holds it (`get_free_block`),
which is split if 512 bytes (small pool) or more than 1 MiB (large pool) remain (`should_split`),
else taken whole. Free neighbours of a segment merge. Segments are kept. With a capacity, a request
that finds no room first gives back every segment that is wholly free, and then fails
(`release_cached_blocks`); without one the device never ends.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from utils.memory.budgets import OverBudgetError
from utils.memory.source import CUDA_BLOCK_BYTES, rounded
from utils.memory.timeline import MemoryTimeline
from utils.units import MIB, format_bytes

SMALL_REQUEST_BYTES = 1 * MIB  # kSmallSize
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_REQUEST_BYTES = 10 * MIB  # kMinLargeAlloc
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
SEGMENT_GRAIN_BYTES = 2 * MIB  # kRoundLarge


class Act(NamedTuple):
    """What the allocator did, in the words of PyTorch's snapshots; `name` is the caller's."""

    action: str
    start: int
    size: int
    name: int = -1


@dataclass(eq=False, slots=True)
class _Block:
    start: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


@dataclass
class CachingAllocator:
    """The allocator's state. `allocated_bytes` counts whole blocks, as PyTorch's statistic does;
    `reserved_bytes` segments. Neither can be below the sum of what was asked for. `history`, if it
    is a list, takes each act; `segments` are start and size of what is reserved."""

    capacity_bytes: int | None = None
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    segments: dict[int, int] = field(default_factory=dict)
    history: list[Act] | None = None
    _next_segment: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _taken: dict[int, _Block] = field(default_factory=dict)

    def allocate(self, address: int, wanted_bytes: int) -> None:
        """Serve a request; `address` is its caller's name for it.

        Raises:
            ValueError: the address is in use.
            OverBudgetError: the capacity is full, also after giving back what is wholly free.
        """
        if address in self._taken:
            raise ValueError(f"Address {address} was taken twice without being freed between.")
        size = rounded(max(wanted_bytes, 1), CUDA_BLOCK_BYTES)
        block = self._best_fit(size) or self._segment(size)
        self._split(block, size)
        block.free = False
        self._taken[address] = block
        self._note("alloc", block, address)
        self.allocated_bytes += block.size
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)

    def release(self, address: int) -> None:
        """Take a block back; it stays reserved.

        Raises:
            KeyError: nothing is held at the address.
        """
        block = self._taken.pop(address)
        self._note("free_completed", block, address)
        self.allocated_bytes -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
                block = self._merged(block, neighbour)
        self._keep(block)

    def empty_cache(self) -> None:
        """Give every segment back that is wholly free, as `torch.cuda.empty_cache()` does."""
        whole = [
            b for b in self._blocks.values() if b.free and self.segments.get(b.start) == b.size
        ]
        for block in whole:
            self._forget(block)
            del self._blocks[block.start]
            self.reserved_bytes -= self.segments.pop(block.start)
            self._note("segment_free", block)

    def layout(self) -> list[tuple[int, int, int | None]]:
        """All blocks in order: start, bytes, and the address that holds it (None: it is free)."""
        holders = {block.start: address for address, block in self._taken.items()}
        blocks = sorted(self._blocks.values(), key=lambda block: block.start)
        return [(block.start, block.size, holders.get(block.start)) for block in blocks]

    def _best_fit(self, size: int) -> _Block | None:
        pool = self._free[size <= SMALL_REQUEST_BYTES]
        place = bisect_left(pool, (size, -1))
        if place == len(pool):
            return None
        return self._blocks[pool.pop(place)[1]]

    def _segment(self, size: int) -> _Block:
        if size <= SMALL_REQUEST_BYTES:
            room = SMALL_SEGMENT_BYTES
        elif size < LARGE_REQUEST_BYTES:
            room = LARGE_SEGMENT_BYTES
        else:
            room = rounded(size, SEGMENT_GRAIN_BYTES)
        self._make_room(room, size)
        block = _Block(self._next_segment, room, size <= SMALL_REQUEST_BYTES)
        self._next_segment += room
        self._blocks[block.start] = block
        self.segments[block.start] = room
        self.reserved_bytes += room
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        self._note("segment_alloc", block)
        return block

    def _make_room(self, room: int, wanted: int) -> None:
        if self.capacity_bytes is None or self.reserved_bytes + room <= self.capacity_bytes:
            return
        self.empty_cache()
        if self.reserved_bytes + room > self.capacity_bytes:
            idle = self.reserved_bytes - self.allocated_bytes
            raise OverBudgetError(
                f"Out of memory. Tried to allocate {format_bytes(wanted)}. The device has "
                f"{format_bytes(self.capacity_bytes)}, of which {format_bytes(self.allocated_bytes)} "
                f"are allocated, and {format_bytes(idle)} are reserved but unallocated."
            )

    def _note(self, action: str, block: _Block, name: int = -1) -> None:
        if self.history is not None:
            self.history.append(Act(action, block.start, block.size, name))

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        enough = rest >= CUDA_BLOCK_BYTES if block.small else rest > SMALL_REQUEST_BYTES
        if enough:
            right = _Block(block.start + size, rest, block.small, block, block.after)
            if block.after is not None:
                block.after.before = right
            block.size, block.after = size, right
            self._keep(right)

    def _merged(self, block: _Block, other: _Block) -> _Block:
        left, right = sorted((block, other), key=lambda part: part.start)
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        del self._blocks[right.start]
        return left

    def _keep(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.start] = block
        insort(self._free[block.small], (block.size, block.start))

    def _forget(self, block: _Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.start)))


def replayed(
    existing: Iterable[tuple[int, int]],
    events: Iterable[tuple[int, ...]],
    allocator: CachingAllocator | None = None,
) -> CachingAllocator:
    """The allocator after a stream of events.

    Args:
        existing: (address, bytes) of blocks that were there before, placed first in this order.
        events: (time, address, bytes, ...), bytes < 0: given back (`AllocationEvent`).
        allocator: one with a capacity or a history; a plain new one if None.

    Raises:
        OverBudgetError: its capacity is too small.
    """
    allocator = allocator or CachingAllocator()
    for address, size in existing:
        if size:
            allocator.allocate(address, size)
    for _, address, size, *_ in events:
        if size > 0:
            allocator.allocate(address, size)
        else:
            allocator.release(address)
    return allocator


def reserved(
    existing: Iterable[tuple[int, int]], events: Iterable[tuple[int, ...]], room_bytes: int | None
) -> CachingAllocator:
    """The allocator after a stream of events, on a device with room for so many bytes.

    Near its end it gives back what is wholly free; where even that is not enough, what it would
    have reserved with room without end. Takes what `replayed` takes.
    """
    before, after = list(existing), list(events)
    endless = replayed(before, after)
    if room_bytes is not None and endless.reserved_bytes > room_bytes:
        with contextlib.suppress(OverBudgetError):
            return replayed(before, after, CachingAllocator(room_bytes))
    return endless


def requests(
    timeline: MemoryTimeline,
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """A step as `replayed` takes it: what was there before, and (time, name, bytes) of all else;
    names are indices of its allocations."""
    existing, events = [], []
    for name, block in enumerate(timeline.allocations):
        if not block.bytes:
            continue
        if block.born_ns <= timeline.start_ns:
            existing.append((name, block.bytes))
        else:
            events.append((block.born_ns, name, block.bytes))
        if block.died_ns is not None:
            events.append((block.died_ns, name, -block.bytes))
    return existing, sorted(events, key=lambda event: (event[0], event[2] > 0))
