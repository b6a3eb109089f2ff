"""Processes that outlive whoever started them: kept in reach, and ended.

A process that starts a session of its own is in no group of its parent's, and when its parent ends
it is nobody's child. On Linux a process may ask to inherit such orphans ("subreaper", prctl(2)):
each killable process does, and the server above them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Collection, Iterable

import psutil

CAN_ADOPT = sys.platform == "linux"
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_SECONDS = 5.0  # for killed processes to be gone; one in a system call may take a while
_LAST_SECONDS = 60.0  # the same where nobody waits for it
_LOOK_SECONDS = 0.005
_EMPTY_LOOKS = 2


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants that lose theirs (Linux alone).

    Processes forked from this one do not inherit that.
    """
    if CAN_ADOPT:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[psutil.Process]:
    """All that a process started and that still has a line of parents up to it."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:  # it has just ended
        return []


def numbered(processes: Iterable[psutil.Process]) -> list[tuple[int, float]]:
    """Processes in a form that can be sent: number and time of creation (s) of each that lives."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append((process.pid, process.create_time()))
    return found


def still_there(sent: Iterable[tuple[int, float]]) -> list[psutil.Process]:
    """The processes that `numbered` named; a number alone may belong to another by now."""
    found = []
    for pid, created_seconds in sent:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            # Processes reckon the time of the last boot each for themselves.
            if abs(process.create_time() - created_seconds) < 1:
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, of which some may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def end_all() -> None:
    """In a process that is to end: end all that it started or inherited, down to the last.

    What has no child at all has, where it inherits, no descendant either: the system says that at
    once, where a list of processes may miss one that is just changing its parent.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    while _has_children() and time.monotonic() < deadline:
        kill(descendants(os.getpid()))
        time.sleep(_LOOK_SECONDS)


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def end_orphans(adopter: int, spared: Collection[int] = ()) -> None:
    """End what `adopter` inherited, down to the last: what a killed orphan started comes next.

    Orphans are those of its children that left its process group. Killable processes do so as
    well: `spared` names those that still run. A look may miss what is just changing its parent, as
    that has ended in the midst of it: the next one sees it.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    empty_looks = 0
    while empty_looks < _EMPTY_LOOKS and time.monotonic() < deadline:
        orphans = _orphans(adopter, spared)
        empty_looks = 0 if orphans else empty_looks + 1
        for orphan in orphans:
            kill([orphan, *descendants(orphan.pid)])
        if orphans:
            time.sleep(_LOOK_SECONDS)


def _orphans(adopter: int, spared: Collection[int]) -> list[psutil.Process]:
    """Also those that have ended and wait for the adopter to reap them."""
    try:
        children = psutil.Process(adopter).children()
        return [each for each in children if each.pid not in spared and _has_left(each, adopter)]
    except psutil.Error:  # it is no more
        return []


def _has_left(process: psutil.Process, adopter: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(process.pid) != os.getpgid(adopter)
    return False
