"""Where a process stands: the learner's line, and the collective it waits in."""

from __future__ import annotations

import re
import site
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_HERE = str(Path(__file__).parent)
_COUNTER = str(Path(__file__).parents[1] / "traffic")  # stands between a learner and a collective
# A virtual environment may lie inside the folder of a project, so names of folders do not tell.
_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


@dataclass(frozen=True)
class Frame:
    """One call on the stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Position:
    """The innermost line of the caller's own code, and the collective called from there, if any."""

    frame: Frame | None = None
    collective: str = ""
    is_finished: bool = False

    def __str__(self) -> str:
        if self.is_finished:
            return "had finished"
        inside = f"stood in {self.collective}" if self.collective else "stood"
        if self.frame is None:
            return inside if self.collective else "stood in no line that could be read"
        return f"{inside} at line {self.frame.line} of {self.frame.function}"


def position_in(stack: Iterable[Frame]) -> Position:
    """Read a position off a stack, innermost call first."""
    collective = ""
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES) and not frame.function.startswith(("_", "wrapper")):
            collective = frame.function  # the outermost: all_gather_object calls all_gather
        if frame.function == "wait_for_the_others" and frame.file.startswith(_HERE):
            return Position(is_finished=True)
        if not frame.file.startswith((*_LIBRARIES, "<frozen", _HERE, _COUNTER)):
            return Position(frame, collective)
    return Position(None, collective)


def frames_of_dump(text: str) -> list[Frame]:
    """The stack that `faulthandler` wrote, innermost call first."""
    return [Frame(m["file"], int(m["line"]), m["function"]) for m in _LINE.finditer(text)]


def frames_of_error(raised: TracebackType | None) -> list[Frame]:
    """The stack at which an exception was raised, innermost call first."""
    steps = traceback.extract_tb(raised)
    return [Frame(step.filename, step.lineno or 0, step.name) for step in reversed(steps)]
