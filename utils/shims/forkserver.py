"""Python's own multiprocessing: ending the server that processes are forked from."""

from __future__ import annotations

import os

from utils.shims.shim import Library, Shim

MULTIPROCESSING = Library("multiprocessing", "of Python 3.11", "utils/shims/forkserver.py")
_STOP = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver._stop", "stop_server",
    "nothing public ends the server, so that the next one may import more",
)  # fmt: skip
_PID = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver._forkserver_pid", "server_pid",
    "nothing public says which process inherits what forked ones leave behind",
)  # fmt: skip
_ALIVE = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver._forkserver_alive_fd", "let_server_go",
    "a forked process holds the pipe whose end tells the server to end",
)  # fmt: skip
_OWNER = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver", "let_server_go", "as for the pipe"
)
SHIMS = (_STOP, _PID, _ALIVE, _OWNER)


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
