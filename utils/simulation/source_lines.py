"""Where in the program something happened: file, line, and what stands there."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = tuple(
    str(Path(__file__).parents[1] / folder) + os.sep for folder in ("simulation", "memory", "shims")
)
_PYTHON = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class Place:
    """The deepest line that is not PyTorch's.

    `caller`: the deepest line of the program's own, where the first is a library's. `asked_in`:
    the file, PyTorch's own included, that holds the innermost line.
    """

    file: str = ""
    line: int = 0
    caller: str = ""
    asked_in: str = ""

    @property
    def text(self) -> str:
        """What stands there."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def short(self) -> str:
        """As values= takes it: "file.py:12"."""
        return f"{os.path.basename(self.file)}:{self.line}"

    def is_named(self, name: str) -> bool:
        """Whether a name stands at that line, or is its "file.py:12"."""
        return name == self.short or bool(re.search(rf"\b{re.escape(name)}\b", self.text))

    def __str__(self) -> str:
        if not self.file:
            return "the program"
        shown = self.file.partition(_LIBRARIES)[2] or os.path.basename(self.file)
        shown = "the cell" if "ipykernel" in self.file else shown
        text = f" (`{shorten(self.text, 80)}`)" if self.text else ""
        return f"{shown}, line {self.line}{text}{self.caller and f', called at {self.caller}'}"


def asking() -> Place:
    """Where the running program is now."""
    return _place((frame, frame.f_lineno) for frame in _running())


def running() -> Iterator[FrameType]:
    """The frames of the running program, PyTorch's among them, the innermost first."""
    return (frame for frame, _ in _not_own((frame, frame.f_lineno) for frame in _running()))


def _running() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while (
        frame is not None
    ):  # a frame in a list of its own would be a cycle, and keep tensors alive
        yield frame
        frame = frame.f_back


def failed(error: BaseException) -> Place:
    """Where an error comes from."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return _place(reversed(frames))


def files(error: BaseException) -> set[str]:
    """The files that an error came through."""
    return {_file(row) for row in traceback.walk_tb(error.__traceback__)}


def _place(frames: Iterable[tuple[FrameType, int]]) -> Place:
    """From frames, the innermost first."""
    others = list(_not_own(frames))
    outside = [row for row in others if not _file(row).startswith(_TORCH)]
    if not outside:
        return Place(asked_in=_file(others[0]) if others else "")
    line, caller = outside[0][1], ""
    if _LIBRARIES in _file(outside[0]):
        program = next((row for row in outside if _LIBRARIES not in _file(row)), None)
        caller = f"{os.path.basename(_file(program))}, line {program[1]}" if program else ""
    return Place(_file(outside[0]), line, caller, _file(others[0]))


def _not_own(frames: Iterable[tuple[FrameType, int]]) -> Iterator[tuple[FrameType, int]]:
    """Without the simulator's own frames, and what PyTorch runs between it and the program."""
    internal = (
        *_OWN,
        "<frozen ",
        "<string>",
        _TORCH + "_",
        _TORCH + "overrides.py",
        _TORCH + "utils" + os.sep + "_",
    )
    for row in frames:
        is_python = _file(row).startswith(_PYTHON) and _LIBRARIES not in _file(row)
        if not is_python and not _file(row).startswith(internal):
            yield row


def _file(row: tuple[FrameType, int]) -> str:
    return row[0].f_code.co_filename
