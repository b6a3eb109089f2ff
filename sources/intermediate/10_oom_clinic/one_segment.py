"""A model of `expandable_segments:True`: each pool has one segment, which grows by pages.

As in PyTorch's allocator, requests up to 1 MiB go to a pool with pages of 2 MiB, larger ones to a pool
with pages of 20 MiB. Free neighbours join, the smallest hole that holds a request serves it, and no page
is given back; PyTorch's can unmap pages that are wholly free.
"""

from __future__ import annotations

from collections.abc import Iterable

from utils.checked import check_public
from utils.memory import MemoryTimeline
from utils.simulation.cuda_allocator import (
    LARGE_SEGMENT_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
    requests,
)

BLOCK_BYTES = 512


def expandable_bytes(timeline: MemoryTimeline) -> int:
    """Bytes that the two growing segments take for a run's requests, in whole pages."""
    existing, events = requests(timeline)
    wanted = [*existing, *((name, size) for _, name, size in events)]
    small = {name for name, size in wanted if 0 < size <= SMALL_REQUEST_BYTES}
    return _grown((one for one in wanted if one[0] in small), SMALL_SEGMENT_BYTES) + _grown(
        (one for one in wanted if one[0] not in small), LARGE_SEGMENT_BYTES
    )


def _grown(wanted: Iterable[tuple[int, int]], page_bytes: int) -> int:
    """Bytes of one segment after (name, bytes) in order, where what is not positive gives back."""
    holes, taken, end_bytes = [(0, 2**60)], dict[int, tuple[int, int]](), 0
    for name, bytes_ in wanted:
        if bytes_ > 0:
            size = -(-bytes_ // BLOCK_BYTES) * BLOCK_BYTES
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
    return -(-end_bytes // page_bytes) * page_bytes


__all__ = ["expandable_bytes"]

check_public(globals())
