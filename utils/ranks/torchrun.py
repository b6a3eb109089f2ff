"""`run_torchrun`: a script on several ranks, started as in production, from a notebook cell.

`!torchrun train.py` in a cell prints its failure and goes on. This raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from utils.checked import asks_first, in_order
from utils.files import scratch
from utils.parallel.loopback import loopback_variables
from utils.ranks.agent import rendezvous_arguments, run_agent
from utils.ranks.child import pack
from utils.ranks.gpus import hide_gpus_unless_enough
from utils.ranks.killable import LOST_PRINTS, OUTPUT_BYTES, KillableProcess, kill_all
from utils.ranks.launch import check_world
from utils.ranks.outcome import Failure, Outcome, describe_exit
from utils.ranks.position import Position, frames_of_dump, position_in
from utils.ranks.report import RankError
from utils.ranks.server import working_folder

DUMP_SECONDS = 1.0  # for ranks to write where they stand
_RANK = b"[rank "
_OF_TORCH = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # its own prefix of uncaught exceptions
_TRACEBACK = "Traceback (most recent call last)"


@asks_first(in_order("script", "world_size", "run_torchrun(path, 4)"))
def run_torchrun(
    script: str | os.PathLike[str],
    world_size: int,
    *args: object,
    timeout_seconds: float = 120.0,
) -> str:
    """Run `torchrun --nproc-per-node=WORLD_SIZE SCRIPT ARGS` on this machine and wait for its end.

    Ranks see no GPU where there is not one for each. What they print is shown as they print it, each
    line with its rank. A launch takes seconds: every rank imports torch anew. Nothing that is opened for it can be reached from another
    machine; another user of this one reaches the store where its ranks meet, which PyTorch opens as a port of
    the loopback address and lets anybody write into. No process is left when this returns or raises.

    Args:
        script: the Python file.
        world_size: ranks on this machine, 1 to 16.
        args: the script's arguments.
        timeout_seconds: for torchrun and its ranks, their start included.

    Returns:
        What the ranks printed; of very much the first 200,000 bytes a rank.

    Raises:
        RankError: a rank failed, with its exit code and its own traceback; or time was over, with
            the line at which each rank stood.
        FileNotFoundError: there is no such script, or the working folder has been deleted.
        ValueError: the world size or the timeout cannot be used.
        RuntimeError: this system cannot start such processes (Windows).
    """
    path = Path(script)
    check_world(world_size, timeout_seconds, "The script comes first: run_torchrun(path, 4).")
    here = working_folder()
    if not path.is_file():
        raise FileNotFoundError(f"There is no script {path.resolve()}: check its name and folder.")
    with scratch("torchrun") as folder:
        run = _Run(path, world_size, [str(a) for a in args], here, folder, timeout_seconds)
        return run.to_its_end()


class _Run:
    """One torchrun with all that it started."""

    def __init__(
        self, script: Path, world_size: int, args: list[str], here: str, logs: Path, seconds: float
    ) -> None:
        command = [
            *rendezvous_arguments(str(logs)),
            f"--nproc-per-node={world_size}",
            "--tee=3",
            f"--log-dir={logs}",
            str(script),
            *args,
        ]
        self._script, self._logs, self._world_size = script, logs, world_size
        self._seconds = seconds
        self._process = KillableProcess(
            pack(run_agent, (command, _environment(world_size), here)),
            timeout_seconds=seconds,
            output_bytes=world_size * OUTPUT_BYTES,
        )
        self._shown: list[str] = []
        self._taken = 0

    def to_its_end(self) -> str:
        """What the ranks printed, shown while they run.

        Raises:
            RankError: a rank failed, or time was over.
        """
        try:
            self._process.start()
            outcome = self._outcome()
        finally:
            kill_all([self._process])
        if outcome.failure:
            what = f"was not reached: torchrun itself {outcome.failure.what}"
            raise RankError(self._script.name, {0: Failure("died", what, self._own_words())}, {})
        if outcome.value:
            raise self._failed(outcome.value)
        return "".join(self._shown)

    def _outcome(self) -> Outcome:
        outcome = None
        while outcome is None:
            wait(self._process.waitables, timeout=self._process.seconds_left)
            if self._process.is_too_slow:
                self._show()
                raise self._too_slow()
            outcome = self._process.poll()
            self._show()
        self._show(to_the_end=True)
        return outcome

    def _show(self, to_the_end: bool = False) -> None:
        """Print the lines of ranks that are new: whole ones, and at the end also the last."""
        output = self._process.output
        end = len(output) if to_the_end else output.rfind(b"\n") + 1
        new, self._taken = output[self._taken : end], max(self._taken, end)
        # What torchrun says itself has no rank. It ends a line wherever a progress bar starts anew.
        lines = [line for line in new.split(b"\n") if line.startswith(_RANK)]
        text = "".join(f"{line.decode(errors='replace')}\n" for line in lines)
        if to_the_end and self._process.has_lost_prints:
            text += f"{LOST_PRINTS}\n"
        self._shown.append(text)
        if text:
            sys.stdout.write(text)

    def _own_words(self) -> str:
        lines = self._process.output.decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith(_RANK.decode()))

    def _failed(self, codes: Mapping[int, int]) -> RankError:
        """Which rank failed first, and what it had to say."""
        by_themselves = {r: code for r, code in codes.items() if code != -signal.SIGTERM} or codes
        failures = {rank: self._failure(rank, code) for rank, code in by_themselves.items()}
        return RankError(self._script.name, failures, {}, self._shown)

    def _failure(self, rank: int, exit_code: int) -> Failure:
        text = self._stderr(rank)
        trace = text[text.rfind(_TRACEBACK) :].strip()
        if exit_code != 1 or not text.count(_TRACEBACK):
            return Failure("died", describe_exit(exit_code), text.strip())
        summary = trace.rpartition("\n")[2]
        return Failure("raised", f"ended with exit code 1: {summary}", trace)

    def _too_slow(self) -> RankError:
        """Where each rank stands, which it writes when it is told to abort."""
        with contextlib.suppress(psutil.Error):
            torchrun = psutil.Process(self._process.pid)
            torchrun.suspend()
            for worker in torchrun.children():  # not what these started: it may share their log
                if worker.cmdline()[1:3] == ["-u", str(self._script)]:
                    worker.send_signal(signal.SIGABRT)
        time.sleep(DUMP_SECONDS)
        stood = {rank: self._position(rank) for rank in range(self._world_size)}
        what = f"did not finish within {self._seconds:g} s and was stopped."
        failures = {
            rank: Failure("timeout", f"{what} It {at}." if at.frame else what, position=at)
            for rank, at in stood.items()
        }
        return RankError(self._script.name, failures, stood)

    def _position(self, rank: int) -> Position:
        # All threads are written; the one that runs the script is the current one.
        stack = self._stderr(rank).rpartition("Current thread ")[2]
        return position_in(frames_of_dump(stack.partition("\nThread ")[0]))

    def _stderr(self, rank: int) -> str:
        """The end of what a rank wrote there."""
        data = b"".join(_end_of(path) for path in self._logs.glob(f"**/{rank}/stderr.log"))
        return _OF_TORCH.sub("", data.decode(errors="replace"))


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - OUTPUT_BYTES))
        return file.read()


def _environment(world_size: int) -> dict[str, str]:
    """What makes ranks print at once and with their number, and say where they stand at an abort."""
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
    }
    found = os.environ | ours | loopback_variables()
    hide_gpus_unless_enough(world_size, found)
    return found
