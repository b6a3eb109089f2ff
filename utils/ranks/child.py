"""What runs inside a killable process: receive a function, call it, send back what came of it."""

from __future__ import annotations

import faulthandler
import importlib
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from utils.ranks.orphans import adopt_orphans, descendants, end_all, numbered
from utils.ranks.pickling import pickled
from utils.ranks.position import frames_of_error, position_in
from utils.ranks.tensor_sizes import given_here
from utils.shims.forkserver import let_server_go

READY, VALUE, RAISED, GIVEN, STARTED = "ready", "value", "raised", "given", "started"


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call as bytes, with the source of notebook cells, which no file holds.

    Raises:
        TypeError: the function or an argument cannot be sent to another process.
    """
    cells = {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}
    try:
        return pickled((function, args, cells))
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{name} and its arguments cannot be sent to another process ({error}). Open files, "
            "locks, generators and running threads cannot travel: create them inside the function."
        ) from error


def serve(
    call: bytes,
    surroundings: AbstractContextManager[Any],
    messages: Connection,
    prints: Connection,
    stacks: Connection,
    can_adopt: bool,
) -> None:
    """Answer one call: first READY, then VALUE with the result or RAISED with a traceback.

    READY is sent inside of `surroundings`, right before the call. The process leads a group of
    its own and inherits what its children leave behind, so that all it started can be found. Where
    nothing can be inherited, it sends STARTED before its answer: once it has ended, nobody knows
    what it has left.
    """
    _stand_alone()
    answers = _Answers(messages)
    threading.Thread(target=_hear_the_parent, args=(messages, answers), daemon=True).start()
    _print_into(prints)
    # A handler in C: it answers also while Python waits in a collective or loops.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    answer = _answer(call, surroundings, answers)
    sys.stdout.flush()
    sys.stderr.flush()
    if not can_adopt:
        answers.send(pickled((STARTED, numbered(descendants(os.getpid())))))
    answers.send(answer)


def _stand_alone() -> None:
    os.setpgid(0, 0)
    adopt_orphans()
    let_server_go()  # its parent holds it, and not what this process may start
    # Workers of a data loader: forked, they need not be sent the data set nor import anything.
    multiprocessing.set_start_method("fork", force=True)


class _Answers:
    """The way to the parent, for two threads: one message at a time."""

    def __init__(self, messages: Connection) -> None:
        self._messages, self._lock = messages, threading.Lock()

    def send(self, answer: bytes) -> None:
        with self._lock:
            self._messages.send_bytes(answer)


def _hear_the_parent(messages: Connection, answers: _Answers) -> None:
    """Tell the parent what it asks for; end when its end of the pipe is closed.

    It closes that because it gave up on this process or is no more. What was started here ends
    first, while it can be found: the server may be gone as well.
    """
    try:
        while True:
            messages.recv_bytes()
            answers.send(pickled((GIVEN, given_here())))
    except (EOFError, OSError):
        end_all()
        os.killpg(0, signal.SIGKILL)


def _print_into(prints: Connection) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(prints.fileno(), descriptor)
        # By lines (buffering=1): what was printed before a kill is seen.
        stream = open(descriptor, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    prints.close()


def _answer(call: bytes, surroundings: AbstractContextManager[Any], answers: _Answers) -> bytes:
    try:
        function, args = _unpack(call)
        with surroundings:
            answers.send(pickled((READY, None)))
            result = function(*args)
    except BaseException as error:  # SystemExit as well: the parent decides what it means  # noqa: BLE001
        return _packed_error(error)
    try:
        return pickled((VALUE, result))
    except Exception as error:  # noqa: BLE001
        unsendable = TypeError(
            f"the result, a {type(result).__name__}, cannot be sent back: {error}"
        )
        return _packed_error(unsendable)


def _unpack(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call, in a process made ready for it."""
    importlib.import_module("utils.ranks.preload")  # no work where the server did it
    torch = importlib.import_module("torch")
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    function, args, cells = cloudpickle.loads(call)
    linecache.cache.update(cells)
    return function, args


def _packed_error(error: BaseException) -> bytes:
    # The outermost frame is _answer above: the reader's traceback starts with their function.
    tail = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, tail))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    position = position_in(frames_of_error(tail))
    return pickled((RAISED, (given_here(), summary, text, position)))
