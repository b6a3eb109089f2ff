"""The records that all parts of the meter exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from utils.units import Category, Phase


class AllocationEvent(NamedTuple):
    """One message of an allocator: `bytes` > 0 was taken at `address`, < 0 given back.

    `thread` is `threading.get_ident()` of who took or gave them, 0 where the source does not tell.
    """

    time_ns: int
    address: int
    bytes: int
    thread: int = 0


class Mark(NamedTuple):
    """From `time_ns` on the step is in `phase`; `label` is a name given by hand, or empty."""

    time_ns: int
    phase: Phase
    label: str = ""


class ModuleSpan(NamedTuple):
    """One forward call of the module at `path`.

    `cast_bytes` are the sizes of the copies that autocast makes of the module's own
    parameters during this call; empty where it makes none.
    """

    start_ns: int
    end_ns: int
    path: str
    cast_bytes: tuple[int, ...] = ()


class LibraryMemory(NamedTuple):
    """Memory that a library takes at its first use, and never gives back.

    A first step takes it `events` births and deaths after the phase called `phase` first began.
    """

    bytes: int
    phase: str
    events: int


class KnownStorage(NamedTuple):
    """At `time_ns`, the storage at `address` held something of this category.

    `on_host`: by the program's placement it lies in host memory.
    """

    time_ns: int
    address: int
    bytes: int
    category: Category
    on_host: bool = False


@dataclass(frozen=True)
class Allocation:
    """A block from birth to death; `died_ns` is None if it outlives the step.

    Times are the source's own clock in nanoseconds. `module` is the path of the innermost
    module whose forward was running at birth, empty outside of any. `on_host`: the program placed
    it in host memory, which on a CPU is the same memory.
    """

    address: int
    bytes: int
    born_ns: int
    died_ns: int | None
    category: Category
    born_in: Phase
    module: str
    on_host: bool = False
