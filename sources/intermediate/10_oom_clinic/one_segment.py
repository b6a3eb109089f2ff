"""A model of `expandable_segments:True`: one segment that grows by pages, in which neighbours join.

It has one pool, takes the smallest hole that holds a request, and never gives a page back; PyTorch's
has two pools and can unmap pages that are wholly free.
"""

from __future__ import annotations

from utils.checked import check_public
from utils.memory import MemoryTimeline
from utils.simulation.cuda_allocator import requests
from utils.units import MIB

PAGE_BYTES = 20 * MIB
BLOCK_BYTES = 512


def one_segment_bytes(timeline: MemoryTimeline) -> int:
    """Bytes that one growing segment takes for a run's requests, in whole pages."""
    existing, events = requests(timeline)
    holes, taken, end_bytes = [(0, 2**60)], dict[int, tuple[int, int]](), 0
    for name, wanted in [*existing, *((name, size) for _, name, size in events)]:
        if wanted > 0:
            size = -(-wanted // BLOCK_BYTES) * BLOCK_BYTES
            start, room = min((h for h in holes if h[1] >= size), key=lambda hole: hole[1])
            holes.remove((start, room))
            holes += [(start + size, room - size)] if room > size else []
            taken[name], end_bytes = (start, size), max(end_bytes, start + size)
        else:
            start, size = taken.pop(name)
            for hole in [h for h in holes if sum(h) == start or h[0] == start + size]:
                holes.remove(hole)
                start, size = min(start, hole[0]), size + hole[1]
            holes.append((start, size))
    return -(-end_bytes // PAGE_BYTES) * PAGE_BYTES


__all__ = ["one_segment_bytes"]

check_public(globals())
