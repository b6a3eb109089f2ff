"""What tests of ranks look at before and after: nothing may be left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil


class Left(NamedTuple):
    """What a launch could leave: processes, open files and sockets, threads, shared memory."""

    processes: int
    descriptors: int
    threads: int
    shared: frozenset[str]


def left() -> Left:
    """What this process holds now."""
    me = psutil.Process()
    shared = Path("/dev/shm")
    names = frozenset(os.listdir(shared)) if shared.is_dir() else frozenset()
    return Left(len(me.children(recursive=True)), me.num_fds(), me.num_threads(), names)


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
