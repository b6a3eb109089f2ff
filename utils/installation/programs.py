"""The programs that set-up runs, and the lock that they hold with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock `file`; where another process has it, call `waiting` and wait.

    Programs that are started meanwhile hold it too, until they end, however this process ends.
    """
    if os.name == "nt":  # which has no such lock
        yield
        return
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        os.set_inheritable(opened.fileno(), True)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def start(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    """A running program, with output and errors in its `stdout`; Ctrl-C reaches it as well."""
    # What it imports is compiled once, for all later kernels, whatever the learner has set.
    environment = {**environment, "PYTHONDONTWRITEBYTECODE": ""}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options = {"cwd": folder, "env": environment, "text": True, "errors": "replace"}
    return subprocess.Popen(command, close_fds=False, **pipes, **options)  # it holds the lock


def output_of(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    seconds: float | None = None,
) -> tuple[int, str]:
    """Exit status and whole output of a program: 127 if it cannot start, 124 if it takes longer."""
    try:
        with start(command, folder, environment) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return 124, f"no answer within {seconds:g} s"
    except OSError as error:
        return 127, str(error)
    return process.returncode, output
