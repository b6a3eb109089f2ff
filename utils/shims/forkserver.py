"""Python's own multiprocessing: ending the server that processes are forked from."""

from __future__ import annotations

from utils.shims.shim import Library, Shim

MULTIPROCESSING = Library("multiprocessing", "of Python 3.11", "utils/shims/forkserver.py")
_STOP = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver._stop", "stop_server",
    "nothing public ends the server, so that the next one may import more",
)  # fmt: skip
_PID = Shim(
    MULTIPROCESSING, "multiprocessing.forkserver:_forkserver._forkserver_pid", "server_pid",
    "what children leave behind is inherited by the server",
)  # fmt: skip
SHIMS = (_STOP, _PID)


def server_pid() -> int | None:
    """The process number of the server; None if none runs."""
    return _PID.get()


def stop_server() -> None:
    """End the server, if one runs. The next launch starts another."""
    _STOP.get()()
