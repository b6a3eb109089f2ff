"""The first step of a run, made of a later one: what the allocator has served before a step begins.

A first step leaves gaps that a later one meets: it takes the optimizer's states after backward, and
the libraries' own memory amid it. A step that was extended from smaller ones has no first step; by
what differs between the two it gets one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from utils.memory.events import LibraryMemory
from utils.memory.timeline import MemoryTimeline
from utils.simulation.cublas import Workspaces
from utils.simulation.cuda_allocator import requests
from utils.units import Category, Phase

Block = tuple[int, int]  # name, bytes
Request = tuple[int, int, int]  # time, name, bytes; bytes < 0: given back


def library_memory(
    workspaces: Workspaces | None, timeline: MemoryTimeline
) -> tuple[LibraryMemory, ...]:
    """Where a first step would take the workspaces, by where each thread's turn begins in this one."""
    if workspaces is None:
        return ()
    _, events = requests(timeline)
    found = []
    for thread, size in workspaces.taken:
        turns = [at for who, at in workspaces.turns if who is thread and at >= timeline.start_ns]
        if turns:
            phase = timeline.phase_at(turns[0])
            begin_ns = _begins(timeline, phase)
            count = sum(begin_ns < time <= turns[0] for time, *_ in events)
            found.append(LibraryMemory(size, phase, count))
    return tuple(found)


def two_steps(
    timeline: MemoryTimeline, libraries: Sequence[LibraryMemory] = ()
) -> tuple[list[Block], list[Request]]:
    """A step after a first one, as `cuda_allocator.reserved` takes it: what was there before both,
    and the requests of both.

    What the step gives back without having taken it, such as gradients, the first one has left;
    blocks of one size are told apart by their order alone.
    """
    existing, events = requests(timeline)
    ended = {name for _, name, size in events if size < 0}
    replaced = [block for block in existing if block[0] in ended]
    lasting = [block for block in existing if block[0] not in ended]
    taken_at = _taken_amid(lasting, timeline, events, libraries)
    own = {name for _, name, size in events if size > 0}
    first = [event for event in events if event[1] in own]
    amid = [(taken_at[name], name, size) for name, size in lasting if name in taken_at]
    left = [(name, size) for _, name, size in first if size > 0 and name not in ended]
    other = len(timeline.allocations)  # an offset: no block of the first step has such a name
    names = _names_in_the_first(replaced, left) | {name: name + other for name in own}
    unmatched = [(0, name, size) for name, size in replaced if name not in names]
    second = [(time, names.get(name, name), size) for time, name, size in events]
    before = [block for block in lasting if block[0] not in taken_at]
    # Stable: at one time, what the step itself takes comes first.
    return before, [*sorted(first + amid, key=lambda event: event[0]), *unmatched, *second]


def _begins(timeline: MemoryTimeline, phase: str) -> int:
    """When a phase of this name first begins; the step's end if it never does."""
    return next((span.start_ns for span in timeline.spans if span.name == phase), timeline.end_ns)


def _taken_amid(
    lasting: Iterable[Block],
    timeline: MemoryTimeline,
    events: Sequence[Request],
    libraries: Iterable[LibraryMemory],
) -> dict[int, int]:
    """When a first step takes what stays: the optimizer's states, and the libraries' memory."""
    blocks = timeline.allocations
    step_ns = next(
        (span.start_ns for span in timeline.spans if span.phase is Phase.OPTIMIZER_STEP),
        timeline.end_ns,
    )
    found: dict[int, int] = {}
    places: defaultdict[int, deque[int]] = defaultdict(deque)
    for memory in libraries:
        places[memory.bytes].append(_time_of(memory, timeline, events))
    for name, size in lasting:
        if blocks[name].category is Category.OPTIMIZER_STATE:
            found[name] = step_ns
        elif blocks[name].category is Category.OTHER and places[size]:
            found[name] = places[size].popleft()
    return found


def _time_of(memory: LibraryMemory, timeline: MemoryTimeline, events: Sequence[Request]) -> int:
    begin_ns = _begins(timeline, memory.phase)
    since = [time for time, *_ in events if time > begin_ns][: memory.events]
    return since[-1] if since else begin_ns


def _names_in_the_first(replaced: Iterable[Block], left: Iterable[Block]) -> dict[int, int]:
    """Which block that the first step left takes the place of which that this one gives back."""
    by_size: defaultdict[int, deque[int]] = defaultdict(deque)
    for name, size in left:
        by_size[size].append(name)
    return {name: by_size[size].popleft() for name, size in replaced if by_size[size]}
