"""What a measurement says beside its figures: steps that were real, growth, other threads."""

from __future__ import annotations

import threading

from utils.memory.events import AllocationEvent, Phase
from utils.memory.timeline import MemoryTimeline
from utils.memory.watched import Watched
from utils.units import format_bytes

GROWN, UNNAMED = "The step left", "An optimizer steps"  # how these notes begin


def other_threads() -> dict[int, str]:
    """Python's threads that run already. Those that a step starts itself are part of it."""
    mine = threading.get_ident()
    running = ((thread.ident, thread.name) for thread in threading.enumerate())
    return {ident: name for ident, name in running if ident is not None and ident != mine}


def taken_by(
    strangers: dict[int, str], events: list[AllocationEvent], timeline: MemoryTimeline
) -> list[str]:
    """A note for each thread that took memory during the step and is no part of it."""
    taken = dict.fromkeys(strangers, 0)
    for event in events:
        if event.thread in taken and timeline.start_ns <= event.time_ns <= timeline.end_ns:
            taken[event.thread] += max(0, event.bytes)
    return [
        f"Counted with the step: {format_bytes(size)} that the thread '{strangers[ident]}' took "
        "meanwhile. For the step alone, measure while no other thread works."
        for ident, size in taken.items()
        if size
    ]


def step_notes(timeline: MemoryTimeline, seen: Watched, steps: int) -> tuple[str, ...]:
    """What a reader should know of a metered step that ran `steps` times in all."""
    notes = [f"The step ran {steps} times for real: model and optimizer have moved on."]
    trains = any(mark.phase is Phase.BACKWARD for mark in timeline.marks)
    if trains and not seen.optimizers:
        notes.append("No optimizer was given: its state, if any, is not told apart.")
    if seen.stepped_elsewhere()[1]:
        notes.append(
            f"{UNNAMED} parameters of a model that was not named. They are counted as kept beside "
            "the model; name all models: model=[first, second]."
        )
    return (*notes, *_grown(timeline))


def _grown(timeline: MemoryTimeline) -> list[str]:
    """A note if the step leaves more behind than it found, and of what."""
    before, after = timeline.at(timeline.start_ns), timeline.at(timeline.end_ns)
    rise = after.total_bytes - before.total_bytes
    if rise <= 0:
        return []
    rows = sorted(((after[c] - before[c], c) for c in after), reverse=True)
    parts = ", ".join(f"{format_bytes(size)} of {category}" for size, category in rows if size > 0)
    return [
        f"{GROWN} {format_bytes(rise)} more behind than it found ({parts}): it grows from "
        "step to step. Keep numbers (.item()) and detached tensors from one step to the next."
    ]
