"""What can come of a call in another process, and the words for it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from utils.ranks.position import Position

UNKNOWN_EXIT = 255  # what multiprocessing says when the server that should know is no more
_NO_SERVER = (
    " So it looks as well when the process that starts the others was killed, as by the system "
    "when memory runs out: run this again, with a smaller model or batch if it comes back."
)
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT")


@dataclass(frozen=True)
class Failure:
    """Why a call has no result.

    `kind` is "raised", "timeout" or "died". `what` goes on from a name: "was killed by SIGKILL."
    `traceback` is the child's own, where it raised. `position` is where it raised, or stood when
    its time was over, as far as known.
    """

    kind: str
    what: str
    traceback: str = ""
    position: Position | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a call: a value or a failure, and all that was printed."""

    value: Any = None
    failure: Failure | None = None
    output: str = ""


class ChildError(RuntimeError):
    """A call in another process that gave no result; `failure` says why."""

    def __init__(self, name: str, failure: Failure) -> None:
        super().__init__("\n\n".join(filter(None, [f"{name} {failure.what}", failure.traceback])))
        self.failure = failure


def describe_exit(exit_code: int | None) -> str:
    """How a process ended that sent no result, as it goes on from a name."""
    if exit_code is None:
        return "closed its connection without a result."
    if exit_code >= 0:
        hint = _NO_SERVER if exit_code == UNKNOWN_EXIT else ""
        return f"ended by itself with exit code {exit_code}, before there was a result.{hint}"
    name, hint = _signal_name(exit_code), ""
    if name == "SIGKILL":
        hint = " So does the system when memory runs out: try a smaller model or batch."
    elif name in _CRASHES:
        hint = " Compiled code crashed: look at the last operation before it."
    return f"was killed by {name}.{hint}"


def describe_late_exit(exit_code: int) -> str:
    """How a process ended that had sent its result and then did not end well."""
    how = (
        f"ended with exit code {exit_code}"
        if exit_code > 0
        else f"was killed by {_signal_name(exit_code)}"
    )
    if exit_code == UNKNOWN_EXIT:
        return f"gave its result and then ended with exit code {exit_code}.{_NO_SERVER}"
    return (
        f"gave its result and then {how}. Something that it had started, such as a thread or a "
        "library's process group, did not end cleanly: look at what it printed last."
    )


def _signal_name(exit_code: int) -> str:
    names = {item.value: item.name for item in signal.Signals}
    return names.get(-exit_code, f"signal {-exit_code}")
