"""Killable processes of whole scripts: nothing runs twice, and nothing stays."""

import subprocess
import sys
from pathlib import Path

from test_killable import is_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]


PRELOAD = """
import torch

def touched(*args):
    raise SystemExit("CUDA was initialised in the process that children are forked from")

# A machine with four GPUs, as far as the driver's own list tells.
torch.cuda._device_count_nvml = lambda: 4
torch.cuda._lazy_init = torch._C._cuda_getDeviceCount = touched
import utils.ranks.preload
assert torch.cuda.device_count() == 4 and torch.cuda.is_available()
"""


def test_the_server_asks_for_gpus_without_initialising_them():
    subprocess.run([sys.executable, "-c", PRELOAD], cwd=ROOT, check=True, timeout=120)


SCRIPT = """
import os, subprocess, sys, time
sys.path.insert(0, {root!r})
from utils.ranks import run_killable

print("script runs", flush=True)

def speak():
    print("function runs")

def report_and_loop():
    child = os.fork()  # it holds every pipe that this process holds
    if not child:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("pids", "w").write(f"{{os.getpid()}} {{child}} {{other.pid}}\\n")
    while True:
        pass

run_killable(speak, timeout_seconds=30)
sys.stdout.flush()
run_killable(report_and_loop, timeout_seconds=30)
"""


def test_a_script_without_a_guard_runs_once_and_takes_its_child_along(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT)))
    command = [sys.executable, "script.py"]
    pid_file = tmp_path / "pids"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as script:
        try:
            assert wait_until(lambda: pid_file.is_file() and pid_file.read_text(), seconds=120)
        finally:
            script.kill()  # as a kernel is killed: no chance to clean up
        printed, _ = script.communicate(timeout=60)  # to the end of all that holds the pipe
        assert printed == "script runs\nfunction runs\n"
    for pid in map(int, pid_file.read_text().split()):
        assert wait_until(lambda: is_gone(pid))  # noqa: B023  (asked at once)


GROUP = """
import os, sys
sys.path.insert(0, {root!r})
import psutil
from utils.ranks import run_killable, run_ranks

run_killable(int, timeout_seconds=60)
run_ranks(int, 2)
children = psutil.Process().children(recursive=True)
print(len(children), [c.cmdline() for c in children if os.getpgid(c.pid) == os.getpgrp()])
"""


def test_no_helper_is_in_the_kernels_own_group():
    """ipykernel waits 29 s at its shutdown for those; and who kills the group, as Jupyter does, must not
    kill the server that is to end the rest."""
    command = [sys.executable, "-c", GROUP.format(root=str(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "2 []\n", "the server and the resource tracker, both elsewhere"
