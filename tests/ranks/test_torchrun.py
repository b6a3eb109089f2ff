"""Scripts under torchrun: shown while they run, loud when they fail, nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rank_cases import wait_until

from utils.lessons import folders
from utils.ranks import RankError, run_killable, run_torchrun

ROOT = Path(__file__).resolve().parents[2]
ADD = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()) + float(sys.argv[1]))
dist.all_reduce(total)
print("total", total.item())
dist.destroy_process_group()
"""
FAIL = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(2))
"""
HANG = """
import subprocess, sys, time

def wait_for_ever():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", __file__])

print("here")
wait_for_ever()
"""
DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    run_killable(int, timeout_seconds=30)  # the server is meant to stay
    me = psutil.Process()
    before = {process.pid for process in me.children(recursive=True)}, me.num_fds()
    yield

    def clean():
        now = {process.pid for process in me.children(recursive=True)}, me.num_fds()
        return now == before and not started_by_scripts(tmp_path)

    assert wait_until(clean), started_by_scripts(tmp_path)


def started_by_scripts(folder):
    """Processes that name a script of this test, whoever adopted them."""
    everyone = psutil.process_iter(["cmdline"])
    return [p for p in everyone if str(folder) in " ".join(p.info["cmdline"] or [])]


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_prints_carry_their_rank(tmp_path, capsys):
    text = run_torchrun(script(tmp_path, ADD), 2, 10)
    assert sorted(text.splitlines()) == ["[rank 0] total 21.0", "[rank 1] total 21.0"]
    assert capsys.readouterr().out == text


def test_an_agent_that_ends_late_was_not_too_slow(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.ranks.killable.EXIT_SECONDS", 0.0)
    assert run_torchrun(script(tmp_path, ADD), 2, 10).count("total 21.0") == 2


def test_a_rank_raises(tmp_path):
    with pytest.raises(RankError) as caught:
        run_torchrun(script(tmp_path, FAIL), 2)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "script.py: rank 1 ended with exit code 1: ValueError: bad batch" in text
    assert 'raise ValueError("bad batch")' in text and text.count("Traceback") == 1


def test_a_rank_dies(tmp_path):
    with pytest.raises(RankError, match=r"rank 0 was killed by SIGKILL.*memory"):
        run_torchrun(script(tmp_path, DIE), 1)


def test_a_script_that_hangs(tmp_path):
    with pytest.raises(RankError) as caught:
        run_torchrun(script(tmp_path, HANG), 2, timeout_seconds=30)
    text = str(caught.value)
    assert "did not finish within 30 s" in text
    assert text.count("at line 5 of wait_for_ever") == 2


LEAVE = """
import subprocess, sys

sleep = [sys.executable, "-c", "import time; time.sleep(600)", __file__]
subprocess.Popen(sleep, start_new_session=True)
subprocess.run(["sh", "-c", 'setsid "$@" &', "sh", *sleep])
if len(sys.argv) > 1:
    sys.exit(3)
"""


def test_what_ranks_leave_behind_ends(tmp_path):
    run_torchrun(script(tmp_path, LEAVE), 2)  # and see the fixture
    with pytest.raises(RankError, match="exit code 3"):
        run_torchrun(script(tmp_path, LEAVE), 1, "fail")


def test_very_many_lines_are_cut(tmp_path, capsys):
    text = run_torchrun(script(tmp_path, "for n in range(200_000): print('line', n)"), 1)
    first, *_, last = text.splitlines()
    assert first == "[rank 0] line 0" and last == "(more was printed, and not kept)"
    assert 190_000 < len(text) < 300_000 and capsys.readouterr().out == text


def test_the_words_of_a_failure_are_not_lost_in_very_many_lines(tmp_path):
    text = "for n in range(50_000): print('line', n)\nraise ValueError('bad batch')"
    with pytest.raises(RankError, match="rank 0 ended with exit code 1: ValueError: bad batch"):
        run_torchrun(script(tmp_path, text), 1)


def test_the_environment_and_the_folder_are_those_of_the_caller(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_COLOUR", "blue")
    monkeypatch.chdir(tmp_path)
    text = "import os; print(os.environ['COURSE_COLOUR'], os.getcwd(), 'torch' in os.sys.modules)"
    assert run_torchrun(script(tmp_path, text), 1) == f"[rank 0] blue {tmp_path} False\n"


UNKNOWN_HOST = """
import sys
sys.path.insert(0, {root!r})
from utils.ranks import run_torchrun
run_torchrun({script!r}, 2, 10, timeout_seconds=100)
"""


def test_a_machine_whose_name_nothing_knows(tmp_path):
    """Looked up, it takes torchrun two minutes."""
    text = UNKNOWN_HOST.format(root=str(ROOT), script=str(script(tmp_path, ADD)))
    rename = 'hostname nowhere.invalid && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", rename, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody give a process another host name (unshare --uts)")
    run = [*command, sys.executable, "-c", text]
    found = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert sorted(found.stdout.splitlines()) == ["[rank 0] total 21.0", "[rank 1] total 21.0"], (
        found
    )


def test_an_interrupt_ends_everything(tmp_path):
    seen = threading.Event()

    class Watching:
        def write(self, text):
            if "here" in text and not seen.is_set():
                seen.set()
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    started = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys, "stdout", Watching())
        run_torchrun(script(tmp_path, HANG), 2)
    signal.signal(signal.SIGINT, before)
    assert seen.is_set() and time.monotonic() - started < 60


@pytest.mark.slow
def test_lesson_04s_script_never_aborts_at_its_end(tmp_path, monkeypatch):
    """On a busy machine, a hundred times: ranks once aborted at random when they exited."""
    path = folders()["04"] / "train.py"
    monkeypatch.chdir(tmp_path)  # the script saves a model where it is started
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(100):
            how = ("--network", "resnet18", "--epochs", 1, "--fake")
            printed = run_torchrun(path, 2, *how, timeout_seconds=900)
            assert printed.count("loss of all ranks") == 1  # of one epoch, by rank 0
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_missing_script(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no script .*absent\.py"):
        run_torchrun(tmp_path / "absent.py", 2)


@pytest.mark.parametrize("world_size", [0, 17, "2", True])
def test_world_sizes_that_cannot_be(tmp_path, world_size):
    with pytest.raises(ValueError, match="world_size="):
        run_torchrun(script(tmp_path, ADD), world_size)


def test_a_timeout_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="timeout_seconds= must be positive"):
        run_torchrun(script(tmp_path, ADD), 2, timeout_seconds=0)
