"""Launching ranks from a running session, beside torchrun of the same worker."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from utils.ranks import run_ranks

from .conftest import Report

WORKER = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4)
dist.all_reduce(total)
dist.destroy_process_group()
"""


def worker() -> float:
    """One all-reduce."""
    total = torch.ones(4)
    dist.all_reduce(total)
    return total[0].item()


def median_seconds(world_size: int, rounds: int) -> float:
    """Of a launch, from the call to the results."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run_ranks(worker, world_size)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def torchrun_seconds(folder: Path) -> float:
    """The same all-reduce on four ranks, started by torchrun."""
    (folder / "worker.py").write_text(WORKER)
    start = time.perf_counter()
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "worker.py"]
    subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def test_launch(tmp_path: Path, report: Report) -> None:
    start = time.perf_counter()
    run_ranks(worker, 4)
    report("first launch of 4 ranks", time.perf_counter() - start, 6.0)
    four = median_seconds(4, rounds=9)
    report("launch of 4 ranks", four, 0.3)
    report("launch of 8 ranks", median_seconds(8, rounds=9), 0.6)
    report(
        "launch of 4 ranks / torchrun of the same", four / torchrun_seconds(tmp_path), 1 / 15, "x"
    )
