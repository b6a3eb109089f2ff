"""The programs of a set-up: one set-up at a time, and nothing left of it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from utils.install import ROOT
from utils.installation import call
from utils.installation.children import Children, alone
from utils.installation.stamp import Stamp

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has neither lock nor lifeline")

# A set-up in a process of its own: it holds the lock, and its child has a child.
INSTALLER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from utils.installation.children import Children, alone
with alone(Path({lock!r}), lambda: None) as lock:
    command = ["sh", "-c", "sleep 600 & echo $! $$; wait"]
    with Children(Path("/"), lock).started(command) as child:
        print(child.stdout.readline(), end="", flush=True)
        child.stdout.read()
"""


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that takes milliseconds; a minute is for a machine that is busy."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def is_alive(process_id: int) -> bool:
    """Whether a process runs; one that waits to be buried does not."""
    with suppress(OSError):
        done = subprocess.run(["ps", "-o", "stat=", "-p", str(process_id)], capture_output=True)
        return bool(done.stdout.strip()) and not done.stdout.strip().startswith(b"Z")
    return False


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "build/setup.lock"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_installer(lock: Path, end: signal.Signals) -> None:
    code = INSTALLER.format(root=str(ROOT), lock=str(lock))
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as installer:
        assert installer.stdout is not None
        family = [int(number) for number in installer.stdout.readline().split()]
        assert len(family) == 2 and all(map(is_alive, family))
        installer.send_signal(end)
        installer.wait(60)
        until(lambda: not any(map(is_alive, family)))
    with alone(lock, lambda: None):  # free, perhaps a moment later: the last of them held it too
        pass


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


def test_a_child_holds_the_lock_until_it_has_ended(lock: Path) -> None:
    code = INSTALLER.format(root=str(ROOT), lock=str(lock)).replace("child.stdout.read()", "pass")
    command = [sys.executable, "-c", code.replace("sleep 600", "sleep 600 </dev/null")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as installer:
        assert installer.stdout is not None
        installer.stdout.readline()
        asked: list[bool] = []

        def end() -> None:
            asked.append(True)
            installer.kill()

        with alone(lock, end):
            assert asked == [True]


def test_a_call_that_waited_finds_the_work_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(Stamp, "is_valid", lambda self: next(answers))
    monkeypatch.setattr(call, "set_up", lambda *_: pytest.fail("it worked twice"))
    with alone(tmp_path / "build/setup.lock", lambda: None):
        thread = threading.Thread(target=call.install, args=(tmp_path,))
        thread.start()
        until(lambda: "waits for it to end" in capsys.readouterr().out)
    thread.join(60)
    assert "Set-up is complete." in capsys.readouterr().out


def test_a_child_ends_with_its_block(tmp_path: Path) -> None:
    children = Children(tmp_path)
    with pytest.raises(ValueError, match="stop"):
        with children.started(["sh", "-c", "sleep 600 & echo $!; wait"]) as process:
            assert process.stdout is not None
            grandchild = int(process.stdout.readline())
            raise ValueError("stop")
    until(lambda: not is_alive(grandchild))
    assert process.returncode != 0


def test_status_output_and_errors_come_back(tmp_path: Path) -> None:
    children = Children(tmp_path)
    assert children.output_of(["sh", "-c", "echo one; echo two >&2; exit 3"]) == (3, "one\ntwo\n")
    assert children.output_of(["sh", "-c", "pwd"])[1].strip() == str(tmp_path)
    assert children.output_of(["sh", "-c", "echo $A"], {"A": "b"}) == (0, "b\n")
    assert children.output_of(["cat"]) == (0, "")  # it has no input to wait for


def test_what_children_import_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "course.py").touch()
    assert Children(tmp_path).output_of([sys.executable, "-c", "import course"]) == (0, "")
    assert list((tmp_path / "__pycache__").glob("course.*.pyc"))
