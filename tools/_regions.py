"""Marked solutions in a lab's script: what the lab hides and its solution keeps.

    # BEGIN SOLUTION
    states = 2 * parameters
    # END SOLUTION
    # STUB: states = ...

Without STUB lines the lab shows `...  # your code here` at the region's indentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

BEGIN, END, STUB = "# BEGIN SOLUTION", "# END SOLUTION", "# STUB:"
DEFAULT_STUB = "...  # your code here"
_MARKER = re.compile(r"\s*#\s*((BEGIN|END)\s*SOLUTION|STUB\b)", re.IGNORECASE)


class SourceError(Exception):
    """A script under sources/ that cannot be built; the text names file and line."""


@dataclass(frozen=True)
class Region:
    """A solution: its lines are begin + 1 to end - 1, its stub takes their place up to `after`."""

    begin: int
    end: int
    after: int
    stub: tuple[str, ...]


def solution_text(text: str, file: str) -> str:
    """The script with its solutions and without any marker."""
    return _join(text, file, lambda lines, region: lines[region.begin + 1 : region.end])


def lab_text(text: str, file: str) -> str:
    """The script with a stub in place of each solution."""
    return _join(text, file, lambda lines, region: region.stub)


def lesson_text(text: str, file: str) -> str:
    """The script as it is.

    Raises:
        SourceError: it has a marker: only labs have solutions.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if _MARKER.match(line):
            raise SourceError(f"{file}:{number}: only labs have solutions; remove this marker.")
    return text


def _join(text: str, file: str, part_of: Callable[[list[str], Region], Sequence[str]]) -> str:
    lines, kept, position = text.splitlines(), [], 0
    for region in regions(lines, file):
        kept += [*lines[position : region.begin], *part_of(lines, region)]
        position = region.after
    return "\n".join([*kept, *lines[position:]]) + "\n"


def regions(lines: list[str], file: str) -> Iterator[Region]:
    """The solutions of a script, in order.

    Raises:
        SourceError: a marker is misspelt, out of place, or without its other half.
    """
    begin, after, in_prose = None, 0, False
    for index, line in enumerate(lines):
        if line.startswith("# %%"):
            _refuse(begin is not None, file, begin, f"there is no {END} in the same cell.")
            in_prose = "[markdown]" in line
        if index < after or not _MARKER.match(line):
            continue
        mark = line.strip()
        _refuse(in_prose, file, index, "a marker must stand in a code cell.")
        _refuse(mark not in (BEGIN, END), file, index, _SPELLING)
        if mark == BEGIN:
            _refuse(begin is not None, file, index, f"a second {BEGIN} before {END}.")
            begin = index
            continue
        if begin is None:
            raise _wrong(file, index, f"{END} without {BEGIN}.")
        stub = _stub_after(lines, begin, index)
        after = index + 1 + len(stub)
        yield Region(begin, index, after, stub or _stub_like(lines[begin], DEFAULT_STUB))
        begin = None
    _refuse(begin is not None, file, begin, f"there is no {END} in the same cell.")


_SPELLING = f"markers are exactly {BEGIN}, {END} and, right after it, {STUB} code."


def _stub_after(lines: list[str], begin: int, end: int) -> tuple[str, ...]:
    """The code of the STUB lines that follow a region."""
    following = takewhile(lambda line: line.strip().startswith(STUB), lines[end + 1 :])
    codes = [line.strip().removeprefix(STUB).removeprefix(" ") for line in following]
    return tuple(stub for code in codes for stub in _stub_like(lines[begin], code))


def _stub_like(marker: str, code: str) -> tuple[str, ...]:
    indent = marker[: len(marker) - len(marker.lstrip())]
    return (f"{indent}{code}",)


def _refuse(is_wrong: bool, file: str, index: int | None, why: str) -> None:
    if is_wrong:
        raise _wrong(file, index or 0, why)


def _wrong(file: str, index: int, why: str) -> SourceError:
    return SourceError(f"{file}:{index + 1}: {why}")
