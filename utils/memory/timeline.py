"""The memory of one step over time: running sum, peak, and who was alive at the peak."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from utils.memory.events import Allocation, Mark
from utils.units import Category, Phase, format_bytes

STATES = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.BUFFERS,
)


@dataclass(frozen=True)
class Breakdown(Mapping[Category, int]):
    """Bytes by category at one moment. The categories add up to `total_bytes`, exactly."""

    bytes_by_category: Mapping[Category, int]

    def __getitem__(self, category: Category | str) -> int:
        try:
            return self.bytes_by_category.get(Category(category), 0)
        except ValueError:
            near = difflib.get_close_matches(str(category), list(Category), n=1, cutoff=0.4)
            offer = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(Category)}."
            raise KeyError(f"{category!r} is no category of bytes. {offer}") from None

    def __iter__(self) -> Iterator[Category]:
        return (category for category in Category if self[category])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_category.values())

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients, optimizer state and buffers."""
        return sum(self[category] for category in STATES)

    def __str__(self) -> str:
        rows = [f"{category:<24}{format_bytes(self[category]):>14}" for category in self]
        return "\n".join([*rows, f"{'total':<24}{format_bytes(self.total_bytes):>14}"])


class PhaseSpan(NamedTuple):
    """A stretch of one phase; `name` is the phase's, or the one given by `phase("...")`."""

    phase: Phase
    name: str
    start_ns: int
    end_ns: int


class Crossing(NamedTuple):
    """The first event that takes the total over a limit."""

    time_ns: int
    limit_bytes: int
    wanted_bytes: int
    alive_bytes: int
    phase: str
    module: str
    category: Category


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocations of one step, from `start_ns` to `end_ns`, with the phases in between.

    `times_ns[i]` is an event and `alive_bytes[i]` what is alive right after it; the first
    entry is the step's start, where only what existed before counts.
    """

    allocations: Sequence[Allocation]
    marks: Sequence[Mark]
    start_ns: int
    end_ns: int
    _deltas: tuple[np.ndarray, np.ndarray, np.ndarray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_deltas", _sorted_deltas(self.allocations))

    @cached_property
    def times_ns(self) -> np.ndarray:
        return np.concatenate([[self.start_ns], self._deltas[0][self._first :]])

    @cached_property
    def alive_bytes(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self._deltas[1])])[self._first :]

    @cached_property
    def _first(self) -> int:
        """How many blocks existed before the step."""
        return sum(1 for a in self.allocations if a.born_ns <= self.start_ns)

    @cached_property
    def peak_bytes(self) -> int:
        """The maximum of the running sum."""
        return int(self.alive_bytes.max())

    @cached_property
    def peak_ns(self) -> int:
        """When the peak is reached first."""
        return int(self.times_ns[self.alive_bytes.argmax()])

    @cached_property
    def peak(self) -> Breakdown:
        """Who is alive at the peak: never a sum of the categories' own maxima."""
        return self.at(self.peak_ns)

    @cached_property
    def lasting_peak_bytes(self) -> int:
        """The maximum without temporaries, wherever it lies: kernels decide those alone."""
        curves = self.series()
        return int((self.alive_bytes - curves.get(Category.TEMPORARIES, 0)).max())

    @property
    def peak_phase(self) -> str:
        return self.phase_at(self.peak_ns)

    @cached_property
    def spans(self) -> tuple[PhaseSpan, ...]:
        """The phases in order; neighbours of one name are joined."""
        joined: list[PhaseSpan] = []
        ends = [mark.time_ns for mark in self.marks[1:]] + [self.end_ns]
        for mark, end_ns in zip(self.marks, ends, strict=True):
            span = PhaseSpan(mark.phase, mark.label or str(mark.phase), mark.time_ns, end_ns)
            if joined and joined[-1].name == span.name:
                span = span._replace(start_ns=joined.pop().start_ns)
            joined.append(span)
        return tuple(joined)

    def phase_at(self, time_ns: int) -> str:
        """The name of the phase at a time."""
        names = [span.name for span in self.spans if span.start_ns <= time_ns]
        return names[-1] if names else str(Phase.BEFORE_FORWARD)

    def at(self, time_ns: int) -> Breakdown:
        """Bytes by category right after the events of `time_ns`."""
        alive: dict[Category, int] = {}
        for a in self.allocations:
            if a.born_ns <= time_ns and (a.died_ns is None or a.died_ns > time_ns):
                alive[a.category] = alive.get(a.category, 0) + a.bytes
        return Breakdown(alive)

    def series(self) -> dict[Category, np.ndarray]:
        """For each category that occurs, its bytes at `times_ns`; they add up to `alive_bytes`."""
        _, deltas, owners = self._deltas
        codes = {category: code for code, category in enumerate(Category)}
        code_of = np.array([codes[a.category] for a in self.allocations], dtype=int)
        present = sorted(set(code_of.tolist()))
        by_code = code_of[owners] if len(code_of) else np.empty(0, dtype=int)
        curves = {}
        for category, code in codes.items():
            if code in present:
                running = np.cumsum(np.where(by_code == code, deltas, 0))
                curves[category] = np.concatenate([[0], running])[self._first :]
        return curves

    def first_crossing(self, limit_bytes: int) -> Crossing | None:
        """The first event after which more than `limit_bytes` are alive, or None."""
        over = np.flatnonzero(self.alive_bytes > limit_bytes)
        if not len(over):
            return None
        if over[0] == 0:
            return self._over_from_the_start(limit_bytes)
        index = int(over[0])
        time_ns, alive = int(self.times_ns[index]), int(self.alive_bytes[index])
        owner = self.allocations[int(self._deltas[2][self._first + index - 1])]
        phase = self.phase_at(time_ns)
        return Crossing(
            time_ns, limit_bytes, owner.bytes, alive, phase, owner.module, owner.category
        )

    def _over_from_the_start(self, limit_bytes: int) -> Crossing:
        existing = self.at(self.start_ns)
        largest = max(existing, key=lambda category: existing[category])
        total = existing.total_bytes
        where = "the time before the step"
        return Crossing(self.start_ns, limit_bytes, total, total, where, "", largest)


def _sorted_deltas(allocations: Iterable[Allocation]) -> tuple[np.ndarray, ...]:
    """Times, byte changes and owners (index of the allocation) of all births and deaths."""
    rows = []
    for index, a in enumerate(allocations):
        rows.append((a.born_ns, 1, a.bytes, index))
        if a.died_ns is not None:  # before births at its time: the two were never alive together
            rows.append((a.died_ns, 0, -a.bytes, index))
    rows.sort(key=lambda row: row[:2])
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 2], table[:, 3]
