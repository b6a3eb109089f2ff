"""Lab 17's job: its texts, its training script tried on two ranks, and both under a real Slurm.

Without Slurm, `stubs` runs the Slurm script.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.files import scratch
from utils.parallel.loopback import LOCALHOST, loopback_port

from .clusters import SlurmError, one_host_slurm

FOLDER = Path(__file__).with_name("job")
STEPS = 12
STOPPED = 75
REAL_SECONDS = 60.0
LOST_SECONDS = (
    500  # SlurmdTimeout by default, 300 s, and two rounds of calls 100 s apart: then a node is dead
)
SAVING_SECONDS = 60  # by which one rank may end after another


def broken(name: str) -> str:
    """The text of job.slurm or train.py as the lab hands it out."""
    return (FOLDER / name).read_text(encoding="utf-8")


def options_of(text: str) -> dict[str, str]:
    """What sbatch reads of a script: `#SBATCH` lines before the first command, long names."""
    short = {"-N": "--nodes", "-o": "--output", "-t": "--time", "-J": "--job-name"}
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            for word in re.findall(r"(-{1,2}\S+(?:\s+[^-\s]\S*)?)", line.removeprefix("#SBATCH")):
                name, _, value = re.sub(r"\s+", "=", word, count=1).partition("=")
                found[short.get(name, name)] = value
        elif line.strip() and not line.startswith("#"):
            break
    return found


def late_options(text: str) -> list[str]:
    """`#SBATCH` lines behind the first command, which sbatch does not read."""
    lines = text.splitlines()
    first = next(
        (i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines)
    )
    return [line for line in lines[first:] if line.startswith("#SBATCH")]


@dataclass(frozen=True)
class Trained:
    """What a training script did that got SIGUSR1 on its last rank alone, and was started again."""

    codes: tuple[int | None, ...]
    steps: list[int]
    saved: int | None
    said: str


def try_training(text: str, timeout_seconds: float) -> Trained:
    """Two ranks on this machine; rank 1 gets the signal after step 2; then both run to the end."""
    with _folder_with(text) as folder:
        first = _start(folder)
        try:
            _wait_for(folder, first, timeout_seconds)
            first[1].send_signal(signal.SIGUSR1)
            codes = _ends(first, timeout_seconds)
            saved = _saved(folder)
            again = _start(folder)
            codes += _ends(again, timeout_seconds)
        finally:
            for process in [*first, *locals().get("again", [])]:
                process.kill()
                process.wait()
        said = "\n".join(path.read_text() for path in sorted(folder.glob("said-*")))
        return Trained(codes, _steps(said), saved, said)


@contextlib.contextmanager
def _folder_with(train: str, job: str = "") -> Iterator[Path]:
    with scratch("lab-17") as folder:
        (folder / "meet.py").write_text(broken("meet.py"), encoding="utf-8")
        (folder / "train.py").write_text(train, encoding="utf-8")
        (folder / "job.slurm").write_text(job, encoding="utf-8")
        yield folder


def _start(folder: Path) -> list[subprocess.Popen[bytes]]:
    port, found = loopback_port(), []
    for rank in range(2):
        known = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": LOCALHOST,
            "MASTER_PORT": str(port),
        }
        with (folder / f"said-{rank}").open("ab") as said:
            found.append(
                subprocess.Popen(
                    [sys.executable, "-u", "train.py"],
                    cwd=folder,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=os.environ | known,
                )
            )
    return found


def _wait_for(
    folder: Path, processes: list[subprocess.Popen[bytes]], timeout_seconds: float, step: int = 2
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        if f"step {step}\n" in (folder / "said-0").read_text():
            return
        time.sleep(0.02)


def _ends(
    processes: list[subprocess.Popen[bytes]], timeout_seconds: float
) -> tuple[int | None, ...]:
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(timeout_seconds))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return tuple(codes)


def _saved(folder: Path) -> int | None:
    try:
        return json.loads((folder / "save.json").read_text())["steps"]
    except (OSError, ValueError, KeyError):
        return None


def _steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)$", text, re.MULTILINE)]


@dataclass(frozen=True)
class Ran:
    """What a real Slurm made of both: states of the job, its steps, and its last words."""

    state: str
    restarts: int
    steps: list[int]
    said: str


def run_for_real(job: str, train: str) -> Ran:
    """Submit to three nodes; once step 8 is printed, send the signal; wait for the end."""
    with _folder_with(train, job) as folder, one_host_slurm(nodes=3) as slurm:
        number = slurm.submit(folder / "job.slurm")
        to_script = "B:" in options_of(job).get("--signal", "")
        output, sent = folder / "out.txt", False
        deadline = time.monotonic() + REAL_SECONDS
        while time.monotonic() < deadline:
            [found] = slurm.job(number)
            text = output.read_text() if output.is_file() else ""
            if not sent and "step 8\n" in text:
                slurm.run(
                    "scancel", "--signal=USR1", *(["--batch"] if to_script else []), str(number)
                )
                sent = True
            if found.state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
                break
            time.sleep(0.1)
        [found] = slurm.job(number)
        with contextlib.suppress(SlurmError):
            slurm.run("scancel", str(number))
        text = output.read_text() if output.is_file() else ""
        return Ran(found.state, found.restarts, _steps(text), text)
