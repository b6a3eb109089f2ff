"""What a run takes step by step: alive after it, at its peak, and reserved by the replayed allocator."""

from __future__ import annotations

from typing import NamedTuple

from utils.checked import check_public
from utils.clinic import Examination
from utils.simulation.cuda_allocator import CachingAllocator, replayed, requests


class Step(NamedTuple):
    """One optimizer step, from the end of the one before it."""

    peak_bytes: int
    alive_bytes: int
    reserved_bytes: int  # simulated, with room without end


def step_ends(found: Examination) -> list[int]:
    """When each optimizer step ended, in ns."""
    return [span.end_ns for span in found.run.timeline.spans if span.name == "optimizer step"]


def by_step(found: Examination) -> list[Step]:
    """Each step of a run in order; what comes after the last one is left out."""
    timeline, allocator = found.run.timeline, CachingAllocator()
    existing, events = requests(timeline)
    replayed(existing, (), allocator)
    steps, start_ns = [], timeline.start_ns
    for end_ns in step_ends(found):
        replayed((), [event for event in events if start_ns < event[0] <= end_ns], allocator)
        inside = (timeline.times_ns >= start_ns) & (timeline.times_ns <= end_ns)
        peak, alive = int(timeline.alive_bytes[inside].max()), timeline.at(end_ns).total_bytes
        steps.append(Step(peak, alive, allocator.reserved_bytes))
        start_ns = end_ns
    return steps


__all__ = ["Step", "by_step", "step_ends"]

check_public(globals())
