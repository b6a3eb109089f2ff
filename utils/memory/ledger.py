"""From events, marks and known storages to allocations with a category each.

One pass in order of time. Whatever is known by its address (parameters, gradients, ...) gets
its category when it is seen; the rest gets it from where it was born and when it died.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from utils.memory.events import (
    Allocation,
    AllocationEvent,
    Category,
    KnownStorage,
    Mark,
    ModuleSpan,
    Phase,
)
from utils.memory.host import HostSpan
from utils.memory.source import rounded

_BACKWARD = {Phase.BACKWARD, Phase.RECOMPUTE}


@dataclass(frozen=True)
class Observations:
    """What hooks saw of one step, `marks` in order. Times are on the clock of the events.

    `communication_bytes`: sizes of buffers that a wrapper is known to keep (DDP's buckets).
    `host_spans`: when which thread made things in host memory.
    """

    start_ns: int
    end_ns: int
    marks: Sequence[Mark]
    spans: Sequence[ModuleSpan] = ()
    known: Sequence[KnownStorage] = ()
    communication_bytes: Sequence[int] = ()
    host_spans: Sequence[HostSpan] = ()

    def made_on_host(self, event: AllocationEvent) -> bool:
        """Whether the thread that took this memory was in `host_memory()`."""
        near = self._host_spans_by_end[bisect_left(self._host_ends_ns, event.time_ns) :]
        return any(
            span.start_ns <= event.time_ns and event.thread in (0, span.thread) for span in near
        )

    @cached_property
    def _host_spans_by_end(self) -> list[HostSpan]:
        return sorted(self.host_spans, key=lambda span: span.end_ns)

    @cached_property
    def _host_ends_ns(self) -> list[int]:
        return [span.end_ns for span in self._host_spans_by_end]

    def marks_after(self, time_ns: int) -> Iterator[Mark]:
        """The marks later than `time_ns`, in order."""
        return islice(self.marks, bisect_right(self._mark_times_ns, time_ns), None)

    @cached_property
    def _mark_times_ns(self) -> list[int]:
        return [mark.time_ns for mark in self.marks]


@dataclass
class _Block:
    address: int
    bytes: int
    born_ns: int
    born_in: Phase
    module: str = ""
    died_ns: int | None = None
    category: Category | None = None
    is_kept: bool = False
    on_host: bool = False


@dataclass
class _Sweep:
    """The state of the pass: what is alive, which phase it is, which modules run."""

    seen: Observations
    granularity_bytes: int
    alive: dict[int, _Block] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    phase: Phase = Phase.BEFORE_FORWARD
    running: list[tuple[ModuleSpan, list[int]]] = field(default_factory=list)

    def exists(self, address: int, size: int) -> None:
        """A block that was there when the recording began; what it holds is found out later."""
        start_ns = self.seen.start_ns
        block = _Block(address, size, start_ns, Phase.BEFORE_FORWARD, is_kept=True)
        self.alive[address] = block
        self.blocks.append(block)

    def allocation(self, event: AllocationEvent) -> None:
        if event.bytes > 0:
            block = _Block(event.address, event.bytes, event.time_ns, self.phase)
            block.on_host = self.seen.made_on_host(event)
            if self.running:
                span, castable = self.running[-1]
                block.module = span.path
                if event.bytes in castable:
                    castable.remove(event.bytes)
                    block.category = Category.CAST_WEIGHTS
            if event.address in self.alive:  # a source that missed the free
                self.alive[event.address].died_ns = event.time_ns - 1
            self.alive[event.address] = block
            self.blocks.append(block)
        elif event.address in self.alive:  # else it is not part of this step's total
            self.alive.pop(event.address).died_ns = event.time_ns

    def known(self, storage: KnownStorage) -> None:
        block = self.alive.get(storage.address)
        if block is None and storage.time_ns <= self.seen.start_ns:
            block = self._older(storage)
        elif block is None and storage.category is Category.INPUTS:
            block = self._older(storage)
        if block is not None:
            block.on_host = block.on_host or storage.on_host
            if block.category in self._weaker(storage.category):
                block.category = storage.category

    @staticmethod
    def _weaker(category: Category) -> tuple[Category | None, ...]:
        """Guesses that this category overrules. FSDP gathers the root before its forward begins."""
        guesses = (None, Category.CAST_WEIGHTS)
        return (*guesses, Category.INPUTS) if category is Category.COMMUNICATION else guesses

    def mark(self, mark: Mark) -> None:
        if mark.phase is Phase.FORWARD and self.phase is Phase.BEFORE_FORWARD:
            for block in self.alive.values():  # what was made for this forward
                if block.born_ns > self.seen.start_ns and block.category is None:
                    block.category = Category.INPUTS
        self.phase = mark.phase

    def enter(self, span: ModuleSpan) -> None:
        sizes = [rounded(size, self.granularity_bytes) for size in span.cast_bytes]
        self.running.append((span, sizes))

    def leave(self, span: ModuleSpan) -> None:
        self.running = [pair for pair in self.running if pair[0] is not span]

    def _older(self, storage: KnownStorage) -> _Block | None:
        """A storage that was there before the recording began."""
        if storage.bytes == 0:
            return None
        size = rounded(storage.bytes, self.granularity_bytes)
        block = _Block(storage.address, size, self.seen.start_ns, Phase.BEFORE_FORWARD)
        self.alive[storage.address] = block
        self.blocks.append(block)
        return block


def allocations(
    events: Sequence[AllocationEvent],
    seen: Observations,
    granularity_bytes: int = 1,
    existing: Iterable[tuple[int, int]] = (),
) -> list[Allocation]:
    """Every block that was alive during the step, with its category.

    Events before `seen.start_ns` belong to the warm-up: what they left alive is part of the
    step's memory. Older memory counts if the source lists it as `existing` (address, bytes), and
    is *kept beside the model* unless it is known; else only known storages and inputs count.
    """
    sweep = _Sweep(seen, granularity_bytes)
    for address, size in existing:
        sweep.exists(address, size)
    for _, _, handle, item in heapq.merge(*_streams(sweep, events, seen)):
        handle(item)
    kept = [b for b in sweep.blocks if b.died_ns is None or b.died_ns > seen.start_ns]
    return [*_unseen_buckets(sweep, kept), *(_allocation(block, seen) for block in kept)]


def _unseen_buckets(sweep: _Sweep, kept: list[_Block]) -> Iterator[Allocation]:
    """Buckets made before the recording began: a wrapper has them, and no event tells of them."""
    seen = sweep.seen
    here = [b.bytes for b in kept if b.born_ns <= seen.start_ns and b.category is None]
    for size in (rounded(size, sweep.granularity_bytes) for size in seen.communication_bytes):
        if size in here:
            here.remove(size)
        else:
            yield Allocation(
                0, size, seen.start_ns, None, Category.COMMUNICATION, Phase.BEFORE_FORWARD, ""
            )


def _streams(sweep: _Sweep, events: Sequence[AllocationEvent], seen: Observations) -> Iterable[Any]:
    """The step's records as sorted streams of (time, order at equal times, handler, record)."""
    inside = [e for e in events if e.time_ns <= seen.end_ns]
    starts = sorted(seen.spans, key=lambda span: (span.start_ns, -span.end_ns))
    ends = sorted(seen.spans, key=lambda span: span.end_ns)
    known = sorted(seen.known, key=lambda storage: storage.time_ns)
    yield [(mark.time_ns, (0, i), sweep.mark, mark) for i, mark in enumerate(seen.marks)]
    yield [(span.start_ns, (1, i), sweep.enter, span) for i, span in enumerate(starts)]
    yield [(event.time_ns, (2, i), sweep.allocation, event) for i, event in enumerate(inside)]
    yield [(storage.time_ns, (3, i), sweep.known, storage) for i, storage in enumerate(known)]
    yield [(span.end_ns, (4, i), sweep.leave, span) for i, span in enumerate(ends)]


def _allocation(block: _Block, seen: Observations) -> Allocation:
    category = block.category or _category_from_life(block, seen)
    born_ns = max(block.born_ns, seen.start_ns)
    return Allocation(
        block.address,
        block.bytes,
        born_ns,
        block.died_ns,
        category,
        block.born_in,
        block.module,
        block.on_host,
    )


def _category_from_life(block: _Block, seen: Observations) -> Category:
    if block.born_ns <= seen.start_ns:
        if block.bytes in seen.communication_bytes:
            return Category.COMMUNICATION
        return Category.KEPT if block.is_kept else Category.OTHER
    if block.born_in is Phase.LOSS:
        return Category.LOGITS_AND_LOSS
    if block.born_in is Phase.FORWARD and _lives_at(block, _forward_ends_ns(block, seen)):
        return Category.ACTIVATIONS
    if not _lives_at(block, _phase_ends_ns(block, seen)):
        return Category.TEMPORARIES
    return Category.RECOMPUTED if block.born_in is Phase.RECOMPUTE else Category.OTHER


def _lives_at(block: _Block, time_ns: int) -> bool:
    return block.died_ns is None or block.died_ns > time_ns


def _forward_ends_ns(block: _Block, seen: Observations) -> int:
    """When backward begins; where none follows, when the block's own forward ends."""
    later = seen.marks_after(block.born_ns)
    backward = (mark.time_ns for mark in later if mark.phase is Phase.BACKWARD)
    return next(backward, _phase_ends_ns(block, seen))


def _phase_ends_ns(block: _Block, seen: Observations) -> int:
    """When the block's phase ends. Recomputation interrupts backward, but does not end it."""
    same = _BACKWARD if block.born_in is Phase.BACKWARD else {block.born_in}
    later = seen.marks_after(block.born_ns)
    return next((mark.time_ns for mark in later if mark.phase not in same), seen.end_ns)
