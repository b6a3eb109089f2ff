"""The programs of a set-up: one set-up at a time, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from utils.install import ROOT
from utils.installation import setup as steps
from utils.installation.programs import alone, output_of
from utils.installation.setup import Installation

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")

# A set-up in a process of its own: it holds the lock, and starts a program.
INSTALLER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from utils.installation.programs import alone, start
with alone(Path({lock!r}), lambda: None):
    program = start(["sh", "-c", "echo $$; exec sleep 600"], Path("/"))
    print(program.stdout.readline(), end="", flush=True)
    program.wait()
"""


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that takes milliseconds; a minute is for a machine that is busy."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "build/setup.lock"


def set_up(lock: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", INSTALLER.format(root=str(ROOT), lock=str(lock))]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def test_ctrl_c_ends_all_and_frees_the_lock(lock: Path) -> None:
    with set_up(lock) as installer:
        assert installer.stdout is not None and installer.stdout.readline()
        os.killpg(installer.pid, signal.SIGINT)  # as a terminal does
    with alone(lock, lambda: pytest.fail("something has it still")):
        pass


def test_a_program_holds_the_lock_until_it_has_ended(lock: Path) -> None:
    with set_up(lock) as installer:
        assert installer.stdout is not None
        program = int(installer.stdout.readline())
        installer.kill()
        installer.wait(60)
        asked: list[bool] = []

        def end() -> None:
            asked.append(True)
            os.kill(program, signal.SIGKILL)

        with alone(lock, end):
            assert asked == [True]


def test_two_never_work_at_once(lock: Path) -> None:
    order: list[str] = []
    waiting, inside = threading.Event(), threading.Event()

    def second() -> None:
        inside.wait(60)
        with alone(lock, waiting.set):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with alone(lock, lambda: pytest.fail("nobody had it")):
        inside.set()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_a_call_that_waited_finds_the_work_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(Installation, "is_done", lambda self: next(answers))
    monkeypatch.setattr(Installation, "run", lambda *_: pytest.fail("it worked twice"))
    with alone(tmp_path / "build/setup.lock", lambda: None):
        thread = threading.Thread(target=steps.install, args=(tmp_path,))
        thread.start()
        until(lambda: "waits for it to end" in capsys.readouterr().out)
    thread.join(60)
    assert "Set-up is complete." in capsys.readouterr().out


def test_status_output_and_errors_come_back(tmp_path: Path) -> None:
    def said(line: str, **options: float) -> tuple[int, str]:
        return output_of(
            ["sh", "-c", line], tmp_path, {"PATH": os.environ["PATH"], "A": "b"}, **options
        )

    assert said("echo one; echo two >&2; exit 3") == (3, "one\ntwo\n")
    assert said("pwd; echo $A") == (0, f"{tmp_path}\nb\n")
    assert said("cat") == (0, ""), "it has no input to wait for"
    assert said("exec sleep 600", seconds=0.3) == (124, "no answer within 0.3 s")
    status, output = output_of([str(tmp_path / "none")], tmp_path)
    assert status == 127 and "No such file" in output


def test_what_programs_import_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "course.py").touch()
    assert output_of([sys.executable, "-c", "import course"], tmp_path) == (0, "")
    assert list((tmp_path / "__pycache__").glob("course.*.pyc"))
