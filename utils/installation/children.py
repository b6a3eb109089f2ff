"""The programs that set-up runs: none outlives it, and no two set-ups work at once."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TETHER = Path(__file__).with_name("tether.py")
UNIX = os.name == "posix"


@contextmanager
def alone(file: Path, waiting: Callable[[], None]) -> Iterator[int | None]:
    """Hold the lock `file`; where another process has it, call `waiting` and wait.

    Yields the lock's descriptor: children that inherit it hold the lock until they have ended. The
    system frees it when its holders die, however they die. On Windows there is no such lock.

    Raises:
        OSError: the file cannot be written.
    """
    if not UNIX:
        yield None
        return
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened.fileno()


class Children:
    """Starts programs that end with this process. One for a set-up.

    Args:
        folder: Where they run.
        lock: Descriptor of a lock that they share; None for none.
    """

    def __init__(self, folder: Path, lock: int | None = None) -> None:
        self.folder, self.lock = folder, lock
        self.environment = dict(os.environ)
        # What they import is compiled once, for all later kernels, whatever the learner has set.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    @contextmanager
    def started(
        self, command: Sequence[str], extra: Mapping[str, str] | None = None, captured: bool = True
    ) -> Iterator[subprocess.Popen[str]]:
        """A running program; it is killed with all that it started if the block ends by an error.

        Args:
            command: Program and arguments.
            extra: More environment variables.
            captured: Whether its output and errors go to the process's `stdout`, a pipe of text.

        Raises:
            OSError: it cannot be started.
        """
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if captured else {}
        options = {
            **output,
            "stdin": subprocess.DEVNULL,
            "env": {**self.environment, **(extra or {})},
            "cwd": str(self.folder),
            "text": True,
            "errors": "replace",
        }
        process, end = self._start(list(command), options)
        try:
            yield process
            process.wait()
        finally:
            end()
            if process.stdout:
                process.stdout.close()
            process.wait()

    def _start(
        self, command: list[str], options: dict
    ) -> tuple[subprocess.Popen[str], Callable[[], None]]:
        """The program, and what ends it with all that it started; harmless once it has ended."""
        if not UNIX:
            process = subprocess.Popen(command, **options)
            return process, process.kill
        theirs, ours = os.pipe()
        inherited = [theirs] if self.lock is None else [theirs, self.lock]
        command = [sys.executable, "-I", str(TETHER), str(theirs), *command]
        try:
            # A session of its own, so that Ctrl-C reaches this process alone and it decides.
            process = subprocess.Popen(
                command, pass_fds=inherited, start_new_session=True, **options
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return process, functools.partial(os.close, ours)

    def output_of(
        self, command: Sequence[str], extra: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Exit status and whole output of a program.

        Raises:
            OSError: it cannot be started.
        """
        with self.started(command, extra) as process:
            output = process.stdout.read() if process.stdout else ""
        return process.returncode, output
