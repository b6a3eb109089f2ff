"""A kernel that dies at any moment of a launch, in any way: ten seconds later nothing of it runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from rank_cases import wait_until

from utils.ranks.elastic import link_problem

ROOT = Path(__file__).resolve().parents[2]
MARK = "COURSE_TEST_KERNEL"  # an environment is inherited, whoever adopts a process
GONE_SECONDS = 10.0
LONGEST_SECONDS = 8.0  # from the launch to the kill: into the work of every launcher
KERNEL = """
import signal, subprocess, sys, time
sys.path.insert(0, {root!r})
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has its programs ignore it
from utils.ranks import run_elastic, run_hosts, run_killable, run_ranks, run_torchrun

WORK = [sys.executable, "-c", "import time; time.sleep(600)"]

def work(*wire):
    subprocess.Popen(WORK, start_new_session=True)  # as a build tool starts its compilers
    time.sleep(600)

print("launches", flush=True)
{launch}
"""
SCRIPT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
LAUNCHES = {
    "torchrun": "run_torchrun('script.py', 2, timeout_seconds=300)",
    "ranks": "run_ranks(work, 3, timeout_seconds=300)",
    "elastic": "run_elastic('script.py', timeout_seconds=300)",
    "hosts": "run_hosts(work, 1, timeout_seconds=300)",
    "check": "run_killable(work, timeout_seconds=300)",
}


class Death(NamedTuple):
    """How a kernel dies: the signal, and whether it goes to its whole group, as Jupyter kills and
    a terminal hangs up."""

    launch: str
    number: signal.Signals
    is_of_group: bool
    seconds: float


WAYS = [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGHUP, True)]


def deaths(count: int, launches: Iterable[str], seed: int) -> list[Death]:
    """As many of each launcher, each way in turn, at random moments."""
    chance, names = random.Random(seed), list(launches)
    return [
        Death(
            names[n % len(names)],
            *WAYS[n // len(names) % len(WAYS)],
            chance.uniform(0, LONGEST_SECONDS),
        )
        for n in range(count)
    ]


def left_by(mark: str) -> list[str]:
    """Processes with this mark that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} of {process.ppid()}: {process.cmdline()}")
        except psutil.Error:  # ended, or another user's
            continue
    return found


def what_is_left(death: Death) -> list[str]:
    """Start a kernel that launches, let it die so, and look ten seconds later at the latest."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(SCRIPT)
        text = KERNEL.format(root=str(ROOT), launch=LAUNCHES[death.launch])
        kernel = subprocess.Popen(
            [sys.executable, "-c", text],
            cwd=folder,
            env=os.environ | {MARK: mark, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with kernel:
            assert kernel.stdout is not None
            kernel.stdout.readline()
            try:
                kernel.wait(death.seconds)
                raise AssertionError(f"{death.launch} ended before it was killed")
            except subprocess.TimeoutExpired:
                (os.killpg if death.is_of_group else os.kill)(kernel.pid, death.number)
            kernel.wait()
        wait_until(lambda: not left_by(mark), GONE_SECONDS)
        left = left_by(mark)
        for row in left:
            os.kill(int(row.partition(" ")[0]), signal.SIGKILL)
        return left


def check(planned: list[Death], at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        found = dict(zip(planned, pool.map(what_is_left, planned), strict=True))
    bad = {death: left for death, left in found.items() if left}
    print(f"{len(bad)} of {len(planned)} kernels left something: {bad}")
    assert not bad, f"{len(bad)} of {len(planned)} kernels left something: {bad}"


def launches() -> list[str]:
    """Those that this system can have; without namespaces hosts are ranks as others."""
    return [name for name in LAUNCHES if name != "hosts" or not link_problem()]


def test_nothing_outlives_a_kernel() -> None:
    check(deaths(6, ["torchrun", "ranks"], seed=0), at_once=2)


@pytest.mark.slow
def test_nothing_outlives_200_kernels() -> None:
    check(deaths(200, launches(), seed=1), at_once=3)
