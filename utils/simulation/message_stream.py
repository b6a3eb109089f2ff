"""The memory of one step as a stream of messages: a phase begins, a block is born, a block dies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from utils.memory.events import Allocation, Category, Mark
from utils.memory.timeline import MemoryTimeline
from utils.units import format_bytes

Values = tuple[int, ...]
_NUMBER = re.compile(r"\d+")
# Order of messages at one time: a phase begins, blocks die, blocks are born.
_MARK, _DIED, _BORN, _EXISTING = range(4)


class Message(NamedTuple):
    """One message of a stream.

    `label` is all that must be the same at every depth. `values` are the numbers that may grow
    with depth: the bytes, then the indices in the module's path; of a death told apart at last
    how many blocks of its label and size live that were born after it.
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


def stream(timeline: MemoryTimeline, told_apart: bool = False) -> list[Message]:
    """The messages of a step in order of time.

    `told_apart`: a death says which block of its label and size it is, for those to whom it matters
    where a block lies. Without it, streams are alike that differ in that alone.
    """
    rows: list[_Row] = [
        (mark.time_ns, _MARK, 0, Message((_MARK, mark.phase, mark.label)))
        for mark in timeline.marks
    ]
    for number, block in enumerate(timeline.allocations):
        born = _EXISTING if block.born_ns <= timeline.start_ns else _BORN
        rows.append((block.born_ns, _BORN, number, _message(born, block)))
        if block.died_ns is not None:
            rows.append((block.died_ns, _DIED, number, _message(_DIED, block)))
    ordered = _in_order(sorted(rows, key=lambda row: row[:3]))
    return list(_told_apart(ordered)) if told_apart else [message for *_, message in ordered]


def _in_order(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Sorted rows, as they are. Autocast's copies, and what hangs on them, die at its end in the order
    of a hash table over addresses, no two times the same; here in the order of their births."""
    for are_deaths, run in groupby(rows, lambda row: row[1] == _DIED):
        ordered = list(run)
        if are_deaths and any(row[3].label[1] is Category.CAST_WEIGHTS for row in ordered):
            ordered.sort(key=lambda row: row[2])
        yield from ordered


def _told_apart(rows: Iterable[_Row]) -> Iterator[Message]:
    codes = _Codes()
    alive: defaultdict[tuple[int, Values], list[int]] = defaultdict(list)
    for _, kind, number, message in rows:
        if kind == _MARK:
            yield message
            continue
        same = alive[codes[message.label], message.values]
        if kind == _DIED:
            at = same.index(number)
            del same[at]
            message = message._replace(values=(*message.values, len(same) - at))
        else:
            same.append(number)
        yield message


def timeline(messages: Stream, told_apart: bool = False) -> MemoryTimeline:
    """The inverse of `stream`, on a clock that counts messages.

    Unless they are told apart, blocks of one label and size die in the order of their births;
    which of them it is changes no sum.

    Raises:
        Misaligned: a block dies that is not alive.
    """
    marks: list[Mark] = []
    births: list[tuple[Message, int]] = []
    alive: defaultdict[tuple[int, Values], list[int]] = defaultdict(list)
    codes = _Codes()
    died: dict[int, int] = {}
    now_ns = 0
    for message in messages:
        now_ns += message.kind != _EXISTING and bool(marks)
        if message.kind == _MARK:
            marks.append(Mark(now_ns, *message.label[1:]))
            continue
        is_told = told_apart and message.kind == _DIED
        values = message.values[:-1] if is_told else message.values
        same = alive[codes[message.label], values]
        younger = message.values[-1] if is_told else len(same) - 1
        if message.kind != _DIED:
            same.append(len(births))
            births.append((message, now_ns))
        elif 0 <= younger < len(same):
            died[same.pop(-1 - younger)] = now_ns
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
