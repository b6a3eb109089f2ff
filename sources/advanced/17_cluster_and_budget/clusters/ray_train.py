"""A Ray of one machine that runs an exported folder, and loses a worker where that is asked for.

Ray opens a dozen ports on every address and obeys whoever reaches them. So it runs in a network of
its own, which has the loopback interface alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from utils.files import scratch
from utils.parallel import saved_steps

from .jobs import losses_of

NAMESPACES = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
LOOK_SECONDS = 0.2


class RayError(RuntimeError):
    """Ray cannot run here, or the run failed; the text says which."""


@dataclass(frozen=True)
class RayRun:
    """What one run of ray_train.py gave.

    Attributes:
        losses: by step, each as it was printed last.
        seconds: the whole run, Ray's own start included.
        killed_at_seconds: when a worker was killed; None where none was.
    """

    losses: list[float]
    seconds: float
    killed_at_seconds: float | None


def ray_problem() -> str:
    """Why Ray cannot run here, in a sentence; "" where it can."""
    if importlib.util.find_spec("ray") is None:
        return 'Ray is not installed here (pip install "ray[train]", 413 MB): here you see the recorded run.'
    if shutil.which("unshare") is None or shutil.which("ip") is None or not _can_unshare():
        return (
            "Ray's ports would be open to the network, and this system does not let us close them "
            "in a network namespace: here you see the recorded run."
        )
    return ""


def _user() -> list[str]:
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def _can_unshare() -> bool:
    tried = ["unshare", *_user(), *NAMESPACES, "true"]
    return subprocess.run(tried, capture_output=True).returncode == 0


def run_ray(
    folder: Path | str, *arguments: str, kill_after: int | None = None, timeout_seconds: float = 300
) -> RayRun:
    """Run the folder's ray_train.py on this machine's CPUs.

    Args:
        folder: an export's.
        arguments: such as "--steps", "6".
        kill_after: a step; once it is saved (--every 1), a worker is killed.
        timeout_seconds: for all of it.

    Raises:
        RayError: Ray is not here, or the run failed or took too long.
    """
    if problem := ray_problem():
        raise RayError(problem)
    with scratch("r", Path("/tmp")) as own:  # sockets have short paths
        start, killed = time.monotonic(), None
        process = _start(Path(folder), list(arguments), str(own))
        try:
            while process.poll() is None and time.monotonic() - start < timeout_seconds:
                saved = saved_steps(Path(folder) / "saves")
                if kill_after is not None and killed is None and saved >= kill_after:
                    _kill_worker(process.pid)
                    killed = time.monotonic() - start
                time.sleep(LOOK_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        seconds = time.monotonic() - start
        text = Path(own, "output").read_text(encoding="utf-8", errors="replace")
    return _read(text, process.returncode, seconds, killed)


def _start(folder: Path, arguments: list[str], own: str) -> subprocess.Popen[bytes]:
    command = [
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "ray",
        sys.executable,
        "-u",
        str(folder / "ray_train.py"),
        "--cpu",
        *arguments,
    ]
    variables = {
        "RAY_TMPDIR": own,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RAY_COLOR_PREFIX": "0",
        "RAY_DEDUP_LOGS": "0",
        "HOME": own,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with Path(own, "output").open("wb") as output:
        return subprocess.Popen(
            ["unshare", *_user(), *NAMESPACES, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | variables,
        )


def _kill_worker(pid: int) -> None:
    """The worker with the most memory is one that trains."""
    every = [
        p
        for p in psutil.Process(pid).children(recursive=True)
        if "ray::" in p.name() + "".join(p.cmdline())
    ]
    if not every:
        raise RayError("No worker of Ray was found that could be killed.")
    max(every, key=lambda process: process.memory_info().rss).send_signal(signal.SIGKILL)


def _read(text: str, code: int, seconds: float, killed: float | None) -> RayRun:
    if code or not losses_of(text):
        last = "\n".join(text.splitlines()[-5:])
        raise RayError(f"ray_train.py ended with exit code {code} after {seconds:.0f} s:\n{last}")
    return RayRun(list(losses_of(text).values()), seconds, killed)
