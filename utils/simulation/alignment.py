"""What repeats in the memory of a step as its model grows, and the step of a model of any depth.

A step's memory is a stream of messages: a phase begins, a block of memory is born, a block dies.
The streams of two depths are the same but for stretches that the deeper one holds in addition:
the parameters of its layer, its forward, its backward, its update. `align` finds these stretches
from three depths, and `Pattern.stream` writes the stream of any other depth. Nothing is fitted:
peaks and categories follow from the stream as they do from a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from utils.simulation.message_stream import Message, Misaligned, Stream, Values


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
class AlignedRun:
    """Messages that occur once, or `repeats` times in a row."""

    terms: Sequence[Term]
    repeated: bool


@dataclass(frozen=True)
class Pattern:
    """What all depths have in common."""

    stretches: Sequence[AlignedRun]

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

    def run(self, i: int, j: int) -> list[AlignedRun] | None:
        """The stretches from (i, j) to the end, or None."""
        common: list[Term] = []
        while (term := self._step(i, j)) is not None:
            common.append(term)
            i, j = i + 1, j + 1
        self.furthest = max(self.furthest, j)
        before = [AlignedRun(common, repeated=False)]
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

    def _candidates(self, i: int, j: int) -> Iterator[AlignedRun]:
        """Stretches that follow once in the second stream and `repeats` times in the third."""
        _, second, third = self._codes
        k = i + self.repeats * (j - i)
        longest = len(second) - len(self.streams[0]) - (j - i)
        for length in range(longest, 0, -1):
            stretch = second[j : j + length]
            if third[k : k + self.repeats * length] == stretch * self.repeats:
                terms = [self._repeated(j + n, k + n, length) for n in range(length)]
                if None not in terms:
                    yield AlignedRun([term for term in terms if term], repeated=True)

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
