"""The states of a machine in which the course is tried: how they are made, judged and cleaned up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import fresh  # noqa: E402

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the states are those of Unix")
OWN = Path(sys.base_prefix, "bin/python3")


def test_set_up_without_make_is_the_command_of_the_page_for_it(tmp_path: Path) -> None:
    words = fresh.steps(fresh.State("no make", OWN, without=("make",)))
    assert words["set-up"] == ["python3", "utils/install.py"]
    assert words["style"] == [".venv/bin/python", "tools/style.py"]
    assert fresh.steps(fresh.State("other", OWN))["set-up"] == ["make", "setup"]
    (tmp_path / "CONTRIBUTING.md").write_text("## Without make\n\n```\nmake setup\n```\n")
    with pytest.raises(ValueError, match=r"names 0 commands of install\.py"):
        fresh.set_up_command(tmp_path)


def test_what_a_state_is_without_is_not_on_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "bin"
    place.mkdir()
    names = ("make", "c++", "g++-12", "gcc", "x86_64-linux-gnu-g++-12", "git", "python3")
    for name in names:
        (place / name).write_text("#!/bin/sh\n")
        (place / name).chmod(0o755)
    (place / "README").write_text("cannot be run")
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{tmp_path / 'none'}")
    fresh.put_programs(fresh.State("any", OWN, without=fresh.COMPILERS), tmp_path / "programs")
    assert {p.name for p in (tmp_path / "programs").iterdir()} == {"git", "make", "python3"}
    assert (tmp_path / "programs/python3").readlink() == OWN, "the state's own Python comes first"


def test_a_state_sees_nothing_of_the_stage_that_tries_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAKEFLAGS", "COURSE_OFFLINE", "VIRTUAL_ENV", "CXX", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "set")
    for name in ("PIP_INDEX_URL", "https_proxy", "HTTPS_PROXY", "SSL_CERT_FILE", "LANG"):
        monkeypatch.setenv(name, "kept")
    found = fresh.variables(tmp_path)
    assert "set" not in {value for name, value in found.items() if name != "UV_CACHE_DIR"}
    assert [name for name, value in found.items() if value == "kept"] and found["HOME"] == str(
        tmp_path / "home"
    )
    assert found["PIP_INDEX_URL"] == found["https_proxy"] == found["SSL_CERT_FILE"] == "kept"


def test_a_state_is_green_told_or_failed() -> None:
    state = fresh.State("2 GB", OWN, told=r"\d GB are needed")
    seconds = {"set-up": 61.2, "lesson 01": 20.0}
    assert fresh.verdict(state, fresh.Tried(seconds)) == ("green", "set-up 61 s, lesson 01 20 s")
    told = fresh.Tried({"set-up": 3.0}, "set-up", "Stopped. 7 GB are needed here.")
    assert fresh.verdict(state, told)[0] == "told"
    wrong = fresh.Tried({"set-up": 3.0}, "set-up", "ValueError: not enough values")
    word, rest = fresh.verdict(state, wrong)
    assert word == "FAILED" and rest.endswith("set-up ended with: ValueError: not enough values")


def test_the_sentence_is_the_users_and_not_makes() -> None:
    output = "[1/8] Python\n\nSet-up stopped. Do this.\nmake: *** [Makefile:34: setup] Error 1\n\n"
    assert fresh.last_sentence(output) == "Set-up stopped. Do this."
    assert fresh.last_sentence("") == ""


def test_one_state_that_fails_is_counted_and_the_others_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [
        fresh.State("one", OWN),
        fresh.State("two", OWN, lacking="no unshare"),
        fresh.State("three", OWN),
    ]
    came = {"one": fresh.Tried({}, "style", "6 errors"), "three": fresh.Tried({"style": 2.0})}
    monkeypatch.setattr(fresh, "try_state", lambda state, _parent: came[state.name])
    assert fresh.try_all(states, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["FAILED", "not", "green"]
    assert "6 errors" in lines[0] and "no unshare" in lines[1]


def test_a_command_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {note}; wait"]
    status, said = fresh.run(tmp_path, command, seconds=2)
    assert status == 124 and said == "It did not end within 2 s."
    pid, end = int(note.read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)


def test_a_room_is_removed_and_so_is_what_a_killed_run_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, other = (
        tmp_path / f"{fresh.PREFIX}{ended.pid}-abc",
        tmp_path / f"{fresh.PREFIX}{os.getpid()}-def",
    )
    for folder in (left, other):
        folder.mkdir()
    with pytest.raises(KeyboardInterrupt), fresh.room(fresh.State("any", OWN), tmp_path) as made:
        assert {path.name for path in made.iterdir()} == {"home", "disk"}
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [other], "the room of a run that still goes on stays"


def test_an_unknown_state_and_a_missing_python_are_sentences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fresh.main(["no such"]) == 1
    assert "There is no state 'no such'; there are: clean clone" in capsys.readouterr().err
    state = fresh.with_python((3, 99), None)
    assert "uv python install 3.99" in state.lacking


def test_no_state_asks_for_what_this_machine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh.shutil, "which", lambda _name: None)
    assert fresh.cannot(fresh.SMALL_DISK) == "it needs Linux with unshare"
    assert fresh.cannot(None) == ""
