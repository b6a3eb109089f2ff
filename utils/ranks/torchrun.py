"""`run_torchrun`: a script on several ranks, started as in production, from a notebook cell.

`!torchrun train.py` in a cell prints its failure and goes on. This raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from utils.ranks.launch import check_world
from utils.ranks.outcome import Failure, describe_exit
from utils.ranks.position import Position, frames_of_dump, position_in
from utils.ranks.report import RankError

DUMP_SECONDS = 1.0  # for ranks to write where they stand
_FAILED = re.compile(r"^\s*rank\s*: (?P<rank>\d+) .*\n\s*exitcode\s*: (?P<code>-?\d+)", re.MULTILINE)
_OF_TORCH = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # its own prefix of uncaught exceptions
_TRACEBACK = "Traceback (most recent call last)"


def run_torchrun(
    script: str | os.PathLike[str],
    world_size: int,
    *args: object,
    timeout_seconds: float = 120.0,
) -> str:
    """Run `torchrun --standalone --nproc-per-node=WORLD_SIZE SCRIPT ARGS` and wait for its end.

    What ranks print is shown as they print it, each line with its rank. A launch takes seconds:
    every rank imports torch anew. No process is left when this returns or raises.

    Args:
        script: the Python file.
        world_size: ranks on this machine, 1 to 16.
        args: the script's arguments.
        timeout_seconds: for everything, the start included.

    Returns:
        What the ranks printed.

    Raises:
        RankError: a rank failed, with its exit code and its own traceback; or time was over, with
            the line at which each rank stood.
        FileNotFoundError: there is no such script.
        ValueError: the world size or the timeout cannot be used.
        RuntimeError: this system has no process groups (Windows).
    """
    if not hasattr(os, "killpg"):
        raise RuntimeError("Windows cannot end torchrun with all its ranks. Run the course in WSL2.")
    path = Path(script)
    check_world(world_size, timeout_seconds, "The script comes first: run_torchrun(path, 4).")
    if not path.is_file():
        raise FileNotFoundError(f"There is no script {path.resolve()}: check its name and folder.")
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        run = _Run(path, world_size, [str(arg) for arg in args], Path(logs))
        try:
            if not run.finished_within(timeout_seconds):
                raise run.too_slow(timeout_seconds)
        finally:
            run.kill()
        if run.exit_code:
            raise run.failed()
    return run.shown


class _Run:
    """One torchrun with all that it started."""

    def __init__(self, script: Path, world_size: int, args: list[str], logs: Path) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={world_size}", "--tee=3", f"--log-dir={logs}",
            str(script), *args,
        ]  # fmt: skip
        self._name, self._logs, self._world_size = script.name, logs, world_size
        self.shown, self._own_words = "", ""
        self._process = subprocess.Popen(
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        if hasattr(psutil, "RLIMIT_CORE"):  # an abort is to leave no file
            with contextlib.suppress(psutil.Error):
                psutil.Process(self._process.pid).rlimit(psutil.RLIMIT_CORE, (0, 0))

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    def finished_within(self, seconds: float) -> bool:
        """Show what is printed until all is over, or the time is."""
        deadline, rest, pipe = time.monotonic() + seconds, b"", self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                if not selector.select(left):
                    continue
                piece = os.read(pipe.fileno(), 65536)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines if piece else [rest]:
                    self._show(line.decode(errors="replace"))
                if not piece:
                    return self._ended_by(deadline)
        return False

    def _ended_by(self, deadline: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, deadline - time.monotonic()))
        return self._process.returncode is not None

    def _show(self, line: str) -> None:
        if not line.startswith("[rank "):  # torchrun's own words
            self._own_words += line + "\n"
            return
        last = line.rstrip("\r").rpartition("\r")[2]  # what a progress bar left standing
        self.shown += last + "\n"
        sys.stdout.write(last + "\n")

    def failed(self) -> RankError:
        """Which rank failed first, and what it had to say."""
        codes = {int(m["rank"]): int(m["code"]) for m in _FAILED.finditer(self._own_words)}
        by_themselves = {r: code for r, code in codes.items() if code != -signal.SIGTERM} or codes
        failures = {rank: self._failure(rank, code) for rank, code in by_themselves.items()}
        if not failures:
            what = f"was not reached: torchrun itself {describe_exit(self.exit_code)}"
            failures = {0: Failure("died", what, self._own_words)}
        return RankError(self._name, failures, {})

    def _failure(self, rank: int, exit_code: int) -> Failure:
        text = self._stderr(rank)
        trace = text[text.rfind(_TRACEBACK) :].strip()
        if exit_code != 1 or not text.count(_TRACEBACK):
            return Failure("died", describe_exit(exit_code), text.strip())
        summary = trace.rpartition("\n")[2]
        return Failure("raised", f"ended with exit code 1: {summary}", trace)

    def too_slow(self, seconds: float) -> RankError:
        """Where each rank stands, which it writes when it is told to abort."""
        with contextlib.suppress(psutil.Error):
            torchrun = psutil.Process(self._process.pid)
            torchrun.suspend()
            for worker in torchrun.children():  # not what these started: it may share their log
                worker.send_signal(signal.SIGABRT)
        time.sleep(DUMP_SECONDS)
        stood = {rank: self._position(rank) for rank in range(self._world_size)}
        what = f"did not finish within {seconds:g} s and was stopped."
        failures = {
            rank: Failure("timeout", f"{what} It {at}." if at.frame else what, position=at)
            for rank, at in stood.items()
        }
        return RankError(self._name, failures, stood)

    def _position(self, rank: int) -> Position:
        # All threads are written; the one that runs the script is the current one.
        stack = self._stderr(rank).rpartition("Current thread ")[2]
        return position_in(frames_of_dump(stack.partition("\nThread ")[0]))

    def _stderr(self, rank: int) -> str:
        files = self._logs.glob(f"**/{rank}/stderr.log")
        text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
        return _OF_TORCH.sub("", text)

    def _stopped(self) -> list[psutil.Process]:
        """Torchrun and its descendants, torchrun stopped, so that it starts and ends nothing."""
        try:
            torchrun = psutil.Process(self._process.pid)
            torchrun.suspend()
            return [torchrun, *torchrun.children(recursive=True)]
        except psutil.Error:
            return []

    def kill(self) -> None:
        """End torchrun, its ranks and what those started."""
        groups = set()
        for process in self._stopped():
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(process.pid))
        for group in groups - {os.getpgrp()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def _environment() -> dict[str, str]:
    """What makes ranks print at once and with their number, and say where they stand at an abort."""
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    return os.environ | ours
