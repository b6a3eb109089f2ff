"""Python's own multiprocessing: starting and ending the server that processes are forked from."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from unittest import mock

from utils.shims.shim import Library, Shim

MULTIPROCESSING = Library("multiprocessing", "of Python 3.11", "utils/shims/forkserver.py")
_STOP = Shim(
    MULTIPROCESSING,
    "multiprocessing.forkserver:_forkserver._stop",
    "stop_server",
    "nothing public ends the server, so that the next one may import more",
)
_PID = Shim(
    MULTIPROCESSING,
    "multiprocessing.forkserver:_forkserver._forkserver_pid",
    "server_pid",
    "nothing public says which process inherits what forked ones leave behind",
)
_ALIVE = Shim(
    MULTIPROCESSING,
    "multiprocessing.forkserver:_forkserver._forkserver_alive_fd",
    "let_server_go",
    "a forked process holds the pipe whose end tells the server to end",
)
_OWNER = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver", "let_server_go", "as for the pipe"
)
_SPAWN = Shim(
    MULTIPROCESSING,
    "multiprocessing.util:spawnv_passfds",
    "helpers_of_their_own_group",
    "what ends a kernel's group must not end the server, which is to end the rest",
    patched=True,
)
SHIMS = (_STOP, _PID, _ALIVE, _OWNER, _SPAWN)


@contextlib.contextmanager
def helpers_of_their_own_group() -> Iterator[None]:
    """Here the server and the resource tracker start in process groups of their own.

    Jupyter kills a kernel's whole group, and a terminal that closes hangs up on it. A kernel that is to end
    also waits up to 29 s for processes of its group; it does not reap these two when they end.
    """
    with mock.patch.object(*_SPAWN.owner(), _spawn_apart):
        yield


def _spawn_apart(path: bytes, args: Sequence[bytes | str], passfds: Sequence[int]) -> int:
    child = subprocess.Popen(
        args, executable=path, pass_fds=passfds, process_group=0, restore_signals=False
    )
    child.returncode = 0  # multiprocessing waits for it, by its number
    return child.pid


def stop_server() -> None:
    """End the server, if one runs. The next launch starts another."""
    _STOP.get()()


def server_pid() -> int | None:
    """The process number of the server; None if none runs."""
    return _PID.get()


def let_server_go() -> None:
    """In a forked process: close the pipe that keeps the server alive, so that others end it."""
    descriptor = _ALIVE.get()
    if descriptor is not None:
        os.close(descriptor)
        _OWNER.get()._forkserver_alive_fd = None
