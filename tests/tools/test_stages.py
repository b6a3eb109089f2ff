"""`make test` and the like: every stage runs, and one that fails names itself, its command and its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import stages  # noqa: E402

ALL = {target: [stage.name for stage in found] for target, found in stages.STAGES.items()}


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that notes its arguments, and fails where FAILS, a pattern of the shell, fits them."""
    monkeypatch.setenv("FAILS", "none")
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in $FAILS) exit 3;; esac\n')
    program.chmod(0o755)
    return str(program)


def test_rules_come_first_and_notebooks_last() -> None:
    assert ALL["test"] == ["style", "libraries", "offload", "sources", "tests", "notebooks"]
    assert ALL["quick"] == ["style", "sources", "quick-tests"]
    assert ALL["optional"][:2] == ["packages", "style"], "types with the optional packages"


@pytest.mark.parametrize(
    ("target", "fails", "named"),
    [
        ("test", "*loadfile?--durations*", ["tests"]),
        ("test", "*--check", ["sources"]),
        ("test", "*nbval*", ["notebooks"]),
        ("test", "-m?pytest?tests/shims/test_shims.py", ["libraries"]),
        ("test", "*style.py", ["style"]),
        ("test", "*", ALL["test"]),
        ("optional", "*skipped*", ["skipped"]),
        ("soak", "*slow", ["slow-tests"]),
        ("soak", "*kernels", ["kernels"]),
        ("soak", "*", ALL["soak"]),
        ("quick", "*without-processes*", ["quick-tests"]),
        ("record", "*", ALL["record"]),
    ],
)
def test_later_stages_run_and_what_failed_is_named(
    target: str,
    fails: str,
    named: list[str],
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS", fails)
    assert stages.run_all(target, tmp_path, python) == 1
    shown = capfd.readouterr()
    assert shown.out.count("ran ") == len(ALL[target])
    told = [line.strip() for line in shown.err.splitlines() if line.startswith("  ")]
    assert sorted(line for line in told if ":" not in line) == sorted(named)
    assert told[1].startswith(f"command: {python} ") and told[2].startswith("log:     build/logs/")
    assert (tmp_path / told[2].split()[1]).read_text().startswith("ran ")


def test_nothing_is_named_where_all_pass(
    python: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert stages.run_all("test", tmp_path, python) == 0
    assert capfd.readouterr().err == ""


def test_tests_see_neither_gpu_nor_network(
    tmp_path: Path,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in stages.ALIKE:  # this test may run in a stage itself, and has its settings then
        monkeypatch.delenv(name, raising=False)
    Path(python).write_text('#!/bin/sh\necho "[$CUDA_VISIBLE_DEVICES] $COURSE_OFFLINE"\n')
    stages.run_all("test", tmp_path, python)
    assert capfd.readouterr().out.count("\n[] 1\n") == len(ALL["test"])
    stages.run_all("record", tmp_path, python)
    assert "[] 1" not in capfd.readouterr().out, "a record is of the device that is there"


def test_what_a_stage_leaves_running_holds_nothing_up(tmp_path: Path, python: str) -> None:
    Path(python).write_text("#!/bin/sh\nsleep 60 &\necho $! > pid\n")
    (done,) = stages.run([stages.Stage("leaves", ())], tmp_path, python, {})
    assert done.status == 0
    psutil.Process(int((tmp_path / "pid").read_text())).kill()


def test_stages_of_one_processor_run_side_by_side(
    tmp_path: Path, python: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each waits here for a file of the other, and what they print is not mixed."""
    meet = 'echo "$1 begins"; touch $1; while ! [ -e $2 ]; do sleep 0.1; done; echo "$1 ends"'
    Path(python).write_text(f"#!/bin/sh\n{meet}\n")
    pair = [stages.Stage(*names, one_processor=True) for names in (("a", "ab"), ("b", "ba"))]
    assert {done.status for done in stages.run(pair, tmp_path, python, {})} == {0}
    shown = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] in (list("aabb"), list("bbaa"))


@pytest.mark.parametrize("started", [1, 4])
def test_an_interrupt_ends_the_stage_too(started: int, tmp_path: Path, python: str) -> None:
    """All four of those that run side by side, and those that are there while others start."""
    Path(python).write_text("#!/bin/sh\ntouch $$.pid\nexec sleep 60\n")
    code = f"import stages, pathlib; stages.run_all('test', pathlib.Path('.'), {python!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tools")},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while len(list(tmp_path.glob("*.pid"))) < started:
        assert process.poll() is None, "it waits for its stages"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: the whole group
    assert process.wait(30) == -signal.SIGINT
    assert not any(psutil.pid_exists(int(file.stem)) for file in tmp_path.glob("*.pid"))


def test_a_command_that_does_not_exist_is_told_which_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages.main(["tests"]) == 2
    assert capsys.readouterr().err == "Name one of: test, quick, optional, soak, record.\n"


def test_what_was_skipped_is_known_only_after_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    assert stages.main(["optional"]) == 1
    assert "run `make test` first" in capsys.readouterr().err
