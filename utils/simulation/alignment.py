"""What repeats in the memory of a step as its model grows, and the step of a model of any depth.

A step's memory is a stream of messages: a phase begins, a block of memory is born, a block dies.
The streams of two depths are the same but for stretches that the deeper one holds in addition:
the parameters of its layer, its forward, its backward, its update. `align` finds these stretches
from three depths, and `Pattern.stream` writes the stream of any other depth. Nothing is fitted:
peaks and categories follow from the stream as they do from a simulated one.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from utils.memory.events import Allocation, Category, Mark
from utils.memory.timeline import MemoryTimeline
from utils.units import format_bytes

Values = tuple[int, ...]
_NUMBER = re.compile(r"\d+")
# Order of messages at one time: a phase begins, blocks die, blocks are born.
_MARK, _DIED, _BORN, _EXISTING = range(4)
_COPY_DIED = (_DIED, Category.CAST_WEIGHTS)


class Message(NamedTuple):
    """One message of a stream.

    `label` is all that must be the same at every depth. `values` are the numbers that may grow
    with depth: the bytes, then the indices in the module's path.
    """

    label: tuple[Any, ...]
    values: Values = ()

    @property
    def kind(self) -> int:
        """A phase's beginning, a birth, a death, or a block that was there before the step."""
        return self.label[0]

    def __str__(self) -> str:
        if self.kind == _MARK:
            return f"the beginning of {self.label[2] or self.label[1]}"
        _, category, born_in, template = self.label
        path = str(template).format(*self.values[1:])
        where = f" of module '{path}'" if path else ""
        what = "the end" if self.kind == _DIED else "the birth"
        return f"{what} of {format_bytes(self.values[0])} of {category}{where} from {born_in}"


Stream = Sequence[Message]
_Row = tuple[int, int, int, Message]  # time, order at that time, number of the block


class Misaligned(ValueError):
    """Streams differ by more than repeated stretches, or have grown by more than a line."""


def stream(timeline: MemoryTimeline) -> list[Message]:
    """The messages of a step in order of time."""
    rows: list[_Row] = [
        (mark.time_ns, _MARK, 0, Message((_MARK, mark.phase, mark.label)))
        for mark in timeline.marks
    ]
    for number, block in enumerate(timeline.allocations):
        born = _EXISTING if block.born_ns <= timeline.start_ns else _BORN
        rows.append((block.born_ns, _BORN, number, _message(born, block)))
        if block.died_ns is not None:
            rows.append((block.died_ns, _DIED, number, _message(_DIED, block)))
    return list(_in_order(sorted(rows, key=lambda row: row[:3])))


def _in_order(rows: Iterable[_Row]) -> Iterator[Message]:
    """The messages of sorted rows. Autocast's copies die at its end in the order of a hash table
    over addresses, no two times the same; here they die in the order of their births."""
    for are_copies, run in groupby(rows, lambda row: row[3].label[:2] == _COPY_DIED):
        ordered = list(run)
        if are_copies:
            ordered.sort(key=lambda row: row[2])
        yield from (row[3] for row in ordered)


def timeline(messages: Stream) -> MemoryTimeline:
    """The inverse of `stream`, on a clock that counts messages.

    Blocks of one label and size die in the order of their births; which of them it is
    changes no sum.

    Raises:
        Misaligned: a block dies that is not alive.
    """
    marks: list[Mark] = []
    births: list[tuple[Message, int]] = []
    alive: defaultdict[tuple[int, Values], deque[int]] = defaultdict(deque)
    codes = _Codes()
    died: dict[int, int] = {}
    now_ns = 0
    for message in messages:
        now_ns += message.kind != _EXISTING and bool(marks)
        if message.kind == _MARK:
            marks.append(Mark(now_ns, *message.label[1:]))
            continue
        same = alive[codes[message.label], message.values]
        if message.kind != _DIED:
            same.append(len(births))
            births.append((message, now_ns))
        elif same:
            died[same.popleft()] = now_ns
        else:
            raise Misaligned(f"{message} comes before its birth.")
    blocks = [_block(birth, i, born, died.get(i)) for i, (birth, born) in enumerate(births)]
    return MemoryTimeline(blocks, marks, 0, now_ns + 1)


class _Codes:
    """A small integer for what a label says of a block. Labels are hashed once each, by their
    address after that: the hash of an enumeration's member is slow."""

    def __init__(self) -> None:
        self._by_address: dict[int, int] = {}
        self._codes: dict[tuple[Any, ...], int] = {}

    def __getitem__(self, label: tuple[Any, ...]) -> int:
        if id(label) not in self._by_address:
            self._by_address[id(label)] = self._codes.setdefault(label[1:], len(self._codes))
        return self._by_address[id(label)]


def _message(kind: int, block: Allocation) -> Message:
    indices = tuple(map(int, _NUMBER.findall(block.module)))
    template = _NUMBER.sub("{}", block.module)
    return Message((kind, block.category, block.born_in, template), (block.bytes, *indices))


def _block(message: Message, address: int, born_ns: int, died_ns: int | None) -> Allocation:
    _, category, born_in, template = message.label
    size, *indices = message.values
    module = template.format(*indices) if indices else template
    return Allocation(address, size, born_ns, died_ns, category, born_in, module)


class Term(NamedTuple):
    """A message whose values are `base + repeats * growth + copy * stride`."""

    label: tuple[object, ...]
    base: Values
    growth: Values
    stride: Values

    def message(self, repeats: int, copy: int = 0) -> Message:
        """The message in a stream with `repeats` stretches, in stretch number `copy`."""
        rows = zip(self.base, self.growth, self.stride, strict=True)
        return Message(self.label, tuple(b + repeats * g + copy * s for b, g, s in rows))


@dataclass(frozen=True)
class Stretch:
    """Messages that occur once, or `repeats` times in a row."""

    terms: Sequence[Term]
    repeated: bool


@dataclass(frozen=True)
class Pattern:
    """What all depths have in common."""

    stretches: Sequence[Stretch]

    def stream(self, repeats: int) -> list[Message]:
        """The stream with each repeated stretch written `repeats` times.

        Raises:
            Misaligned: a size that shrinks with depth would fall below zero.
        """
        messages = [
            term.message(repeats, copy)
            for stretch in self.stretches
            for copy in range(repeats if stretch.repeated else 1)
            for term in stretch.terms
        ]
        for message in messages:
            if any(value < 0 for value in message.values):
                raise Misaligned(f"{message} would have a size or an index below zero.")
        return messages


def align(streams: tuple[Stream, Stream, Stream], repeats: int) -> Pattern:
    """The pattern of three streams that hold its stretches 0, 1 and `repeats` >= 2 times.

    Beside stretches, a message may grow by the same amount with every repetition: the size of
    a buffer for all layers, the index of the last one.

    Raises:
        Misaligned: there is no such pattern; says where the search got no further.
    """
    first, second, third = map(len, streams)
    search = _Search(streams, repeats)
    stretches = search.run(0, 0) if third - first == repeats * (second - first) else None
    if stretches is None:
        raise Misaligned(search.failure())
    return Pattern(stretches)


@dataclass
class _Search:
    """Walks three streams in step; where they part, tries stretches, the longest first: a
    layer of like blocks is one stretch, not one a block.

    A position is (i, j) in the first two streams; that in the third follows, as it holds
    what the second has in addition `repeats` times.
    """

    streams: tuple[Stream, Stream, Stream]
    repeats: int
    furthest: int = 0
    failed: set[tuple[int, int]] = field(default_factory=set)
    _codes: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        # Small integers stand for (label, bytes): stretches are compared very often.
        codes: dict[object, int] = {}
        keys = ([(m.label, m.values[:1]) for m in stream] for stream in self.streams)
        self._codes = [[codes.setdefault(key, len(codes)) for key in part] for part in keys]

    def run(self, i: int, j: int) -> list[Stretch] | None:
        """The stretches from (i, j) to the end, or None."""
        common: list[Term] = []
        while (term := self._step(i, j)) is not None:
            common.append(term)
            i, j = i + 1, j + 1
        self.furthest = max(self.furthest, j)
        before = [Stretch(common, repeated=False)]
        if i == len(self.streams[0]) and j == len(self.streams[1]):
            return before
        if (i, j) in self.failed:
            return None
        for stretch in self._candidates(i, j):
            rest = self.run(i, j + len(stretch.terms))
            if rest is not None:
                return [*before, stretch, *rest]
        self.failed.add((i, j))
        return None

    def _step(self, i: int, j: int) -> Term | None:
        """The next message, if it is the same in all streams but for growth along a line."""
        first, second, third = self.streams
        k = i + self.repeats * (j - i)
        if i >= len(first) or j >= len(second) or k >= len(third):
            return None
        a, b, c = first[i], second[j], third[k]
        if not a.label == b.label == c.label:
            return None
        growth = _minus(b.values, a.values)
        if _minus(c.values, a.values) != tuple(self.repeats * g for g in growth):
            return None
        return Term(a.label, a.values, growth, (0,) * len(growth))

    def _candidates(self, i: int, j: int) -> Iterator[Stretch]:
        """Stretches that follow once in the second stream and `repeats` times in the third."""
        _, second, third = self._codes
        k = i + self.repeats * (j - i)
        longest = len(second) - len(self.streams[0]) - (j - i)
        for length in range(longest, 0, -1):
            stretch = second[j : j + length]
            if third[k : k + self.repeats * length] == stretch * self.repeats:
                terms = [self._repeated(j + n, k + n, length) for n in range(length)]
                if None not in terms:
                    yield Stretch([term for term in terms if term], repeated=True)

    def _repeated(self, j: int, k: int, length: int) -> Term | None:
        """A message of a stretch, if its indices advance evenly from copy to copy."""
        one = self.streams[1][j]
        copies = [self.streams[2][k + n * length].values for n in range(self.repeats)]
        stride = _minus(copies[1], copies[0])
        if any(_minus(b, a) != stride for a, b in pairwise(copies)):
            return None
        moved = _minus(copies[0], one.values)
        if any(m % (self.repeats - 1) for m in moved):
            return None
        growth = tuple(m // (self.repeats - 1) for m in moved)
        return Term(one.label, _minus(one.values, growth), growth, stride)

    def failure(self) -> str:
        """Where the streams part for good."""
        second = self.streams[1]
        message = second[min(self.furthest, len(second) - 1)]
        return f"Their steps are no repetitions of the same layers: they part at {message}."


def _minus(a: Values, b: Values) -> Values:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def line(streams: Sequence[Stream], value_at: Callable[[Sequence[int]], int]) -> list[Message]:
    """The stream that has the same messages as all of `streams`, with sizes by `value_at`.

    Raises:
        Misaligned: the streams differ by more than their sizes.
    """
    if len({len(stream) for stream in streams}) > 1:
        raise Misaligned("Their steps take and give back a different number of blocks.")
    return [_merged(same, value_at) for same in zip(*streams, strict=True)]


def _merged(same: Sequence[Message], value_at: Callable[[Sequence[int]], int]) -> Message:
    first, *others = same
    label, indices = first.label, first.values[1:]
    if any(other.label != label or other.values[1:] != indices for other in others):
        raise Misaligned(f"Their steps part at {first}.")
    sizes = [message.values[0] for message in same if message.values]
    return Message(label, (value_at(sizes), *indices)) if sizes else first
