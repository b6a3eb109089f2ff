"""What tests of ranks look at before and after: nothing may be left behind."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from utils.ranks import server

SHARED = Path("/dev/shm")
_MAPPED = re.compile(r"/dev/shm/(\S+)")


class Left(NamedTuple):
    """What launches could leave, here and in the server that ranks are forked from."""

    processes: int
    descriptors: int
    threads: int
    files: frozenset[str]

    def beyond(self, before: Left) -> dict[str, object]:
        """What there is more of than before; empty if nothing."""
        new = {"files": sorted(self.files - before.files)}
        for name in ("processes", "descriptors", "threads"):
            new[name] = max(0, getattr(self, name) - getattr(before, name))
        return {name: what for name, what in new.items() if what}


def left(folder: Path | None = None) -> Left:
    """What this process and those it started hold now, and what lies in a temporary folder.

    Shared memory that other programs of this machine have in use is none of it.
    """
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    names = _shared()
    shared = names - _mapped_elsewhere({process.pid for process in family}) if names else names
    shared &= _shared()  # what another program let go while this looked is nobody's
    files = {str(path) for path in folder.rglob("*")} if folder else set()
    descriptors = sum(map(_descriptors, family))
    return Left(len(family) - 1, descriptors, me.num_threads(), frozenset(shared | files))


def _shared() -> set[str]:
    return set(os.listdir(SHARED)) if SHARED.is_dir() else set()


def _descriptors(process: psutil.Process) -> int:
    try:
        return process.num_fds()
    except psutil.Error:  # it has just ended
        return 0


def _mapped_elsewhere(family: set[int]) -> set[str]:
    found: set[str] = set()
    for pid in set(psutil.pids()) - family:
        with contextlib.suppress(OSError):
            found.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    return found


@contextlib.contextmanager
def nothing_left(folder: Path | None = None) -> Iterator[None]:
    """Fail if more is there after the block than before it, once what ends has had time to."""
    before = left(folder)
    yield
    seen: list[dict[str, object]] = []

    def none_beyond() -> bool:
        seen.append(left(folder).beyond(before))
        return not seen[-1]

    assert wait_until(none_beyond), seen[-5:]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether a condition comes true in time.

    The time is generous: what is left stays left, and a machine under load may need many seconds
    to end and reap a killed rank.
    """
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true  # not asked again: what another program does next is none of this


@contextlib.contextmanager
def server_of_torch() -> Iterator[None]:
    """Here ranks are forked from a server of its own, that has imported torch and no other library.

    The usual one takes over what the whole suite has imported, which takes several times as long.
    """
    server.stop_server()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "LIBRARIES", {})
            yield
    finally:
        server.stop_server()
