"""One function call in a process that can be killed: the core under checks and ranks.

The first launch takes seconds, while the server imports torch; each later one about 0.1 s.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import psutil

from utils.ranks.child import GIVEN, RAISED, READY, STARTED, pack, serve
from utils.ranks.orphans import CAN_ADOPT, descendants, kill, still_there
from utils.ranks.outcome import ChildError, Failure, Outcome, describe_exit, describe_late_exit
from utils.ranks.position import Position, frames_of_dump, position_in
from utils.ranks.server import end_orphans_of_server, start_server, without_main
from utils.ranks.tensor_sizes import Given

if TYPE_CHECKING:  # Windows has no such class
    from multiprocessing.context import ForkServerContext

START_SECONDS = 120.0  # for the first launch on a slow disk; no part of a call's timeout
EXIT_SECONDS = 2.0  # for a process that has answered to end by itself
STACK_SECONDS = 0.3  # for a process to write where it stands, and to say what it gave
OUTPUT_BYTES = 200_000  # of prints that are kept: an endless loop prints without end
LOST_PRINTS = "(more was printed, and not kept)"


class KillableProcess:
    """A call in a process of its own: `start` it, `poll` until there is an outcome, `kill` it.

    Whoever starts some must end with `kill_all`, whatever happened in between; a second call of it
    does nothing. `call` comes from `pack`. `timeout_seconds` counts from the moment the function
    is called, inside of `surroundings`. Of prints, `output_bytes` are kept.
    """

    def __init__(
        self,
        call: bytes,
        *,
        timeout_seconds: float,
        surroundings: AbstractContextManager[Any] | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._output_bytes = output_bytes
        self.output = bytearray()  # what was printed so far
        self._call, self._surroundings = call, surroundings or contextlib.nullcontext()
        self._process: BaseProcess | None = None
        self._messages: Connection | None = None
        self._prints: Connection | None = None
        self._stacks: Connection | None = None
        self._deadline, self._is_called = 0.0, False
        self._value, self._has_answered = None, False
        self._outcome: Outcome | None = None  # found while something else was asked
        self._given: Sequence[Given] | None = None
        self._started: list[psutil.Process] = []  # as seen while it still ran

    def start(self) -> None:
        """Launch the process; blocks until the server is ready, then about 0.1 s.

        Raises:
            RuntimeError: this system cannot start one, or the server broke down.
        """
        context = start_server()
        self._messages, for_messages = _pipe(context)
        self._prints, for_prints = _pipe(context, duplex=False)
        self._stacks, for_stacks = _pipe(context, duplex=False)
        ends = (for_messages, for_prints, for_stacks)
        args = (self._call, self._surroundings, *ends, CAN_ADOPT)
        process = context.Process(target=serve, args=args)
        self._process = process
        try:
            with without_main():
                process.start()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("The helper process could not start; run this again.") from error
        finally:
            for end in ends:
                end.close()
        self._deadline = time.monotonic() + START_SECONDS

    @property
    def pid(self) -> int | None:
        """The number of the process while there is one."""
        return self._process.pid if self._process else None

    @property
    def is_too_slow(self) -> bool:
        """Whether the function runs, and its time is over; not one that answered and is ending."""
        return self._is_called and not self._has_answered and self.seconds_left == 0

    @property
    def waitables(self) -> list[Any]:
        """What `multiprocessing.connection.wait` takes, to wait for one process or many."""
        if not self._process:
            return []
        pipes = (self._prints, None if self._has_answered else self._messages)
        return [*filter(None, pipes), self._process.sentinel]

    @property
    def seconds_left(self) -> float:
        """Until the timeout, or that of ending after the answer; 0 when it is over."""
        return max(0.0, self._deadline - time.monotonic())

    def poll(self, seconds: float = 0.0) -> Outcome | None:
        """Wait up to `seconds` for news, and return the outcome if that was it.

        A value is an outcome once its process has ended: one that crashes after it gave its
        result has failed. One that does not end by itself, as a thread in it goes on, is stopped.
        """
        if self._outcome:
            return self._outcome
        ready = wait(self.waitables, timeout=min(seconds, self.seconds_left))
        if self._prints in ready:
            self._read_prints()
        has_ended = self._process is not None and self._process.sentinel in ready
        # Asked again, as it may have answered and ended between two looks of `wait`.
        if self._messages in ready or (has_ended and self._has_message()):
            return self._receive()
        if has_ended:
            return self._finish(self._value, self._death())
        if time.monotonic() >= self._deadline:
            return self._finish(self._value, None if self._has_answered else self._timeout())
        return None

    def _has_message(self) -> bool:
        return not self._has_answered and self._messages is not None and self._messages.poll()

    def position(self) -> Position:
        """Where the running function stands."""
        if self._has_answered:
            return Position(is_finished=True)
        pid, stacks = self.pid, self._stacks
        if pid is None or stacks is None or not self._is_called:
            return Position()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        text, dump, deadline = b"", b"", time.monotonic() + STACK_SECONDS
        # Written in pieces, outermost call last, which is this package's. What lies before the
        # dump's first line is the end of an earlier one.
        while b" in serve\n" not in dump and stacks.poll(max(0, deadline - time.monotonic())):
            piece = os.read(stacks.fileno(), 65536)
            if not piece:
                break
            text += piece
            dump = text.partition(b"(most recent call first):\n")[2]
        return position_in(frames_of_dump(dump.decode(errors="replace")))

    def given(self) -> Sequence[Given]:
        """What the function gave to collectives, until it raised or now; () without an answer."""
        if self._has_answered or not self._messages or not self._is_called:
            return self._given or ()
        self._given, deadline = None, time.monotonic() + STACK_SECONDS
        with contextlib.suppress(OSError):  # it has just ended
            self._messages.send_bytes(b"given?")
            while self._given is None and self._messages.poll(max(0, deadline - time.monotonic())):
                self._outcome = self._receive()
                if self._outcome or self._has_answered:
                    break
        return self._given or ()

    @property
    def has_lost_prints(self) -> bool:
        """Whether more was printed than is kept."""
        return len(self.output) > self._output_bytes

    def kill(self) -> None:
        """End the process and whatever it started; leave nothing behind."""
        self._end_process()
        for pipe in filter(None, (self._messages, self._prints, self._stacks)):
            pipe.close()
        self._messages = self._prints = self._stacks = None

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            # Not all it started need be of its group: a build tool gives each compiler its own.
            self._see_descendants(process)
            # It leads a group of its own. One that has just ended leaves the group's number
            # free, or taken by what it started.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            kill(self._started)
            process.join()
            process.close()

    def _see_descendants(self, process: BaseProcess) -> None:
        if process.pid is not None and process.exitcode is None:
            self._started += descendants(process.pid)

    def _receive(self) -> Outcome | None:
        assert self._messages is not None  # open until there is an outcome
        try:
            data = self._messages.recv_bytes()
        except (EOFError, OSError):
            return self._finish(failure=self._death())
        try:
            kind, content = cloudpickle.loads(data)
        except Exception as error:  # noqa: BLE001
            what = f"has a result that cannot be read here: {error}"
            return self._finish(failure=Failure("raised", what))
        if kind == READY:
            self._deadline, self._is_called = time.monotonic() + self.timeout_seconds, True
            return None
        if kind == GIVEN:
            self._given = content
            return None
        if kind == STARTED:
            self._started += still_there(content)
            return None
        if kind == RAISED:
            self._given, summary, *where = content
            return self._finish(failure=Failure("raised", f"raised {summary}", *where))
        self._deadline, self._has_answered = time.monotonic() + EXIT_SECONDS, True
        self._value = content
        return None

    def _finish(self, value: Any = None, failure: Failure | None = None) -> Outcome:
        if self._process and failure and failure.kind == "raised":
            self._process.join(EXIT_SECONDS)  # killed, it would leave its semaphores behind
        self._end_process()
        # Only now: before, a thread that never stops printing would have kept this going.
        while self._prints and not self.has_lost_prints and self._prints.poll():
            self._read_prints()
        self.kill()
        text = self.output[: self._output_bytes].decode(errors="replace")
        cut = f"\n{LOST_PRINTS}\n" if self.has_lost_prints else ""
        return Outcome(None if failure else value, failure, text + cut)

    def _read_prints(self) -> None:
        assert self._prints is not None  # its callers have just asked it
        data = os.read(self._prints.fileno(), 65536)
        if not data:
            self._prints.close()
            self._prints = None
        elif not self.has_lost_prints:
            self.output += data

    def _timeout(self) -> Failure:
        if not self._is_called:
            what = f"had no process to run in within {START_SECONDS:g} s; try once more."
            return Failure("timeout", what)
        position = self.position()
        where = f" It {position}." if position.frame else ""
        what = f"did not finish within {self.timeout_seconds:g} s and was stopped.{where}"
        return Failure("timeout", what, position=position)

    def _death(self) -> Failure | None:
        """What is wrong with how the process ended; None if nothing is."""
        assert self._process is not None  # `_end_process` comes after
        self._process.join(EXIT_SECONDS)
        exit_code = self._process.exitcode
        if self._has_answered:
            return Failure("died", describe_late_exit(exit_code)) if exit_code else None
        return Failure("died", describe_exit(exit_code))


def _pipe(context: ForkServerContext, *, duplex: bool = True) -> tuple[Connection, Connection]:
    """Both ends. They are of another class on Windows alone, which has no such context."""
    return cast("tuple[Connection, Connection]", context.Pipe(duplex))


def kill_all(processes: Iterable[KillableProcess]) -> None:
    """End processes and all that they started, also what they left behind when they ended."""
    for process in processes:
        process.kill()
    end_orphans_of_server()


def run_killable(function: Callable[..., Any], *args: Any, timeout_seconds: float) -> Any:
    """Call `function(*args)` in a process of its own and return its result.

    The function may be defined in a notebook or script. It runs on one thread; what it prints is
    printed here once it has ended. However this call ends, the process is gone afterwards.

    Raises:
        ChildError: it raised (with its own traceback), died, or took more than `timeout_seconds`.
        TypeError: the function or an argument cannot be sent to another process.
        RuntimeError: this system cannot start such processes.
    """
    outcome = run_to_outcome(function, *args, timeout_seconds=timeout_seconds)
    sys.stdout.write(outcome.output)
    if outcome.failure:
        raise ChildError(_name_of(function), outcome.failure)
    return outcome.value


def run_to_outcome(function: Callable[..., Any], *args: Any, timeout_seconds: float) -> Outcome:
    """Like `run_killable`, with failure and output returned instead of raised and printed."""
    process = KillableProcess(pack(function, args), timeout_seconds=timeout_seconds)
    outcome = None
    try:
        process.start()
        while outcome is None:
            outcome = process.poll(seconds=60.0)
    finally:
        kill_all([process])
    return outcome


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
