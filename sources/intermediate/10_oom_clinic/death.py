"""The caching allocator at the request that it could not serve."""

from __future__ import annotations

from dataclasses import dataclass

from evidence.record import recorded
from utils.checked import check_public
from utils.clinic import Examination
from utils.memory import OverBudgetError
from utils.simulation.cuda_allocator import CachingAllocator, replayed, requests
from utils.units import MIB

from .segments import Segment


@dataclass(frozen=True)
class Death:
    """What was reserved when a request failed, the bytes that it asked for, and after which step."""

    segments: tuple[Segment, ...]
    asked_bytes: int
    steps_done: int

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(size for segment in self.segments for size, _ in segment.blocks)

    @property
    def holes(self) -> list[int]:
        """Bytes of the free blocks, the largest first."""
        found = [size for s in self.segments for size, name in s.blocks if not name]
        return sorted(found, reverse=True)


def death_of(found: Examination, capacity_bytes: int | None = None) -> Death:
    """Where the replay of a run dies on a GPU of that size: its budget, if none is given.

    Raises:
        ValueError: the GPU serves every request.
    """
    timeline = found.run.timeline
    allocator = CachingAllocator(capacity_bytes=capacity_bytes or found.patient.limit_bytes)
    existing, events = requests(timeline)
    replayed(existing, (), allocator)
    for event in events:
        try:
            replayed((), [event], allocator)
        except OverBudgetError:
            ends = [span.end_ns for span in timeline.spans if span.name == "optimizer step"]
            done = sum(end < event[0] for end in ends)
            return Death(named_segments(found, allocator), event[2], done)
    raise ValueError(f"{found.patient.name} does not die: the GPU serves every request.")


def more_on_the_card(found: Examination) -> list[tuple[str, int]]:
    """Categories of which the recorded GPU's peak of the script as it came has a MiB or more beyond a run's peak."""
    card = next(record for record in recorded("oom_fragmentation") if record.on_gpu).rows[0]
    more = ((name, size - found.run.breakdown[name]) for name, size in card["breakdown"].items())
    return [(name, size) for name, size in more if size >= MIB]


def named_segments(found: Examination, allocator: CachingAllocator) -> tuple[Segment, ...]:
    """Each segment's blocks in order, with the category of what is alive; "" for a free one."""
    layout, blocks = allocator.layout(), found.run.timeline.allocations
    named = [
        (at, size, "" if name is None else str(blocks[name].category)) for at, size, name in layout
    ]
    return tuple(
        Segment(tuple((size, name) for at, size, name in named if first <= at < first + room))
        for first, room in sorted(allocator.segments.items())
    )


__all__ = ["Death", "death_of", "more_on_the_card", "named_segments"]

check_public(globals())
