"""A run's requests through the simulated caching allocator: what a GPU would have reserved."""

from __future__ import annotations

from dataclasses import dataclass

from utils.memory.budgets import OverBudgetError
from utils.memory.timeline import MemoryTimeline
from utils.simulation.cuda_allocator import (
    SEGMENT_GRAIN_BYTES,
    Act,
    CachingAllocator,
    replayed,
    requests,
)
from utils.units import format_bytes


@dataclass(frozen=True)
class Replay:
    """The allocator at one moment of a run, all that it did until then, and the run's allocations by their index."""

    allocator: CachingAllocator
    timeline: MemoryTimeline
    acts: tuple[tuple[int, Act], ...]  # time in ns, act

    @property
    def idle_bytes(self) -> int:
        """Reserved and not allocated."""
        return self.allocator.reserved_bytes - self.allocator.allocated_bytes

    def segments(self) -> list[tuple[tuple[int, bool], ...]]:
        """The blocks of each segment, as (bytes, whether in use)."""
        layout, found = self.allocator.layout(), []
        for first, size in sorted(self.allocator.segments.items()):
            inside = [block for block in layout if first <= block[0] < first + size]
            found.append(tuple((block[1], block[2] is not None) for block in inside))
        return found

    def summary(self) -> str:
        """The rows of `torch.cuda.memory_summary()` that decide: now, and at the peak."""
        a = self.allocator
        rows = [
            ("Allocated memory", a.allocated_bytes, a.allocated_peak_bytes),
            ("GPU reserved memory", a.reserved_bytes, a.reserved_peak_bytes),
            ("Non-releasable memory", pinned_bytes(a) - a.allocated_bytes, None),
        ]
        head = f"{'Metric (simulated)':<24}{'Cur usage':>12}{'Peak usage':>12}"
        return "\n".join([head, *(_row(*row) for row in rows)])


def replay(
    timeline: MemoryTimeline, capacity_bytes: int | None = None, until_ns: int | None = None
) -> Replay:
    """Serve a timeline's requests in order, first those that were there before the step.

    Args:
        timeline: of a metered run.
        capacity_bytes: how much the GPU has; None for no end.
        until_ns: where to stop, on the timeline's clock; None for the run's end.

    Raises:
        OverBudgetError: the capacity is too small.
    """
    allocator = CachingAllocator(capacity_bytes=capacity_bytes, history=[])
    existing, events = requests(timeline)
    replayed(existing, (), allocator)
    acts = [(timeline.start_ns, act) for act in allocator.history or ()]
    for event in events:
        if until_ns is not None and event[0] > until_ns:
            break
        done = len(allocator.history or ())
        replayed((), [event], allocator)
        acts += [(event[0], act) for act in (allocator.history or ())[done:]]
    return Replay(allocator, timeline, tuple(acts))


def smallest_capacity(timeline: MemoryTimeline) -> int:
    """The smallest GPU, in steps of 2 MiB, on which the allocator serves every request."""
    existing, events = requests(timeline)

    def serves(capacity: int) -> bool:
        try:
            replayed(existing, events, CachingAllocator(capacity_bytes=capacity))
        except OverBudgetError:
            return False
        return True

    low, high = 0, replayed(existing, events).reserved_bytes // SEGMENT_GRAIN_BYTES
    while low < high:  # serves(high) holds
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle * SEGMENT_GRAIN_BYTES) else (middle + 1, high)
    return high * SEGMENT_GRAIN_BYTES


def pinned_bytes(allocator: CachingAllocator) -> int:
    """Bytes of the segments in which something is alive: what cannot be given back."""
    used = {start for start, _, name in allocator.layout() if name is not None}
    return sum(
        size
        for start, size in allocator.segments.items()
        if any(start <= address < start + size for address in used)
    )


def _row(name: str, now: int, peak: int | None) -> str:
    return f"{name:<24}{format_bytes(now):>12}{'' if peak is None else format_bytes(peak):>12}"
