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
_LOOK_SECONDS = 0.005


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


def end_orphans(adopter: int, spared: Collection[int] = ()) -> None:
    """End what `adopter` inherited, down to the last: what a killed orphan started comes next.

    Orphans are those of its children that left its process group. Killable processes do so as
    well: `spared` names those that still run.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while orphans := _orphans(adopter, spared):
        for orphan in orphans:
            kill([orphan, *descendants(orphan.pid)])
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)


def _orphans(adopter: int, spared: Collection[int]) -> list[psutil.Process]:
    try:
        children = psutil.Process(adopter).children()
        return [each for each in children if each.pid not in spared and _has_left(each, adopter)]
    except psutil.Error:  # it is no more
        return []


def _has_left(process: psutil.Process, adopter: int) -> bool:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        is_running = process.status() != psutil.STATUS_ZOMBIE  # the adopter will reap it
        return is_running and os.getpgid(process.pid) != os.getpgid(adopter)
    return False
