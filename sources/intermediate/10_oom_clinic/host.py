"""The patient that the device's meter cannot see: a loader whose workers fill the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from utils.checked import check_public
from utils.lessons import SOURCES
from utils.rules import one_of, whole
from utils.units import format_bytes

from . import full_loader

WIDTHS = {"float32": 4, "uint8": 1}  # bytes of a number
MOST = 16


@dataclass(frozen=True)
class HostRun:
    """What a loader kept in shared memory at four moments of a run, and the mean of its images."""

    waiting_bytes: int
    shared_bytes: tuple[int, ...]
    mean: float

    @property
    def is_measured(self) -> bool:
        """Whether this system tells how much memory processes share; Linux does."""
        return any(self.shared_bytes)

    def __str__(self) -> str:
        seen = ", ".join(dict.fromkeys(map(format_bytes, self.shared_bytes)))
        moments = f"measured at {len(self.shared_bytes)} moments"
        return f"{format_bytes(self.waiting_bytes)} wait (predicted); {seen} shared ({moments})"


def batch_bytes(dtype: str) -> int:
    """Bytes of one batch of `full_loader`."""
    channels, height, width = full_loader.SHAPE
    return full_loader.BATCH * channels * height * width * WIDTHS[dtype]


def run_loader(workers: int = 4, prefetch: int = 8, dtype: str = "float32") -> HostRun:
    """Run the loader's script in a process of its own.

    Raises:
        ValueError: no worker, more than 16, or no such type.
        RuntimeError: the script failed; the message ends in its last line.
    """
    whole("run_loader", workers=workers, prefetch=prefetch)
    one_of("dtype", dtype, tuple(WIDTHS))
    if max(workers, prefetch) > MOST:
        raise ValueError(
            f"workers is {workers} and prefetch {prefetch}; both can be {MOST} at most."
        )
    command = [sys.executable, "-m", full_loader.__name__, "--workers", str(workers)]
    command += ["--prefetch", str(prefetch), "--dtype", dtype]
    env = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"The loader's script failed: {last}")
    found = json.loads(done.stdout)
    waiting = workers * prefetch * batch_bytes(dtype)
    return HostRun(waiting, tuple(found["shared_bytes"]), found["mean"])


__all__ = ["HostRun", "run_loader"]

check_public(globals())
