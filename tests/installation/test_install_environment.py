"""The environment: kept, made anew, mended after a move, cleaned of damaged packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from index_cases import add_wheel

from utils.installation import environment
from utils.installation.environment import Environment, is_whole
from utils.installation.ways_out import SetupError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="its folders have other names there")


def made(folder: Path) -> Environment:
    """An environment with a launcher of pip in place of pip, which takes ten times longer to make."""
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    environment = Environment(folder)
    environment.python.with_name("pip3").write_text(f"#!{environment.python}\n")
    return environment


def unpacked(environment: Environment, name: str) -> Path:
    """A package as an installer leaves it; its record."""
    site = environment.sites()[0]
    add_wheel(site.parents[3] / "wheels", name, "1.0")
    wheel = site.parents[3] / f"wheels/{name}/{name}-1.0-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    (site / f"{name}-1.0.dist-info/INSTALLER").write_text("uv")
    return site / f"{name}-1.0.dist-info"


def test_one_that_works_is_kept_with_what_is_in_it(tmp_path: Path) -> None:
    environment = made(tmp_path / ".venv")
    record = unpacked(environment, "good")
    version = ".".join(map(str, sys.version_info[:2]))
    assert environment.make() == f"kept, with its Python {version}"
    assert record.is_dir()
    assert environment.installed("good") == "1.0"
    assert environment.installed("goo") == ""


@pytest.mark.parametrize("fault", ["no interpreter", "too old", "broken"])
def test_one_that_does_not_work_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    environment = made(tmp_path / ".venv")
    record = unpacked(environment, "good")
    assert environment.version() == ".".join(map(str, sys.version_info[:2]))
    environment.python.unlink()
    if fault == "no interpreter":
        environment.python.symlink_to("/no/such/python")
    else:  # the system's Python was replaced
        environment.python.write_text(f"#!/bin/sh\nexit {int(fault == 'broken')}\n")
        environment.python.chmod(0o755)
    assert environment.version() == ""
    monkeypatch.setattr(Environment, "_install_pip", lambda *_: None)
    assert environment.make() == "made anew: the one that was there does not run here"
    assert environment.version() and not record.exists()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/\.venv cannot be made"):
        Environment(tmp_path / "file" / ".venv").make()


def test_a_disk_that_is_full_already_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = (1, "OSError: [Errno 28] No space left on device: 'pip/__init__.py'")
    monkeypatch.setattr(environment, "output_of", lambda _command, _folder: full)
    with pytest.raises(SetupError, match=r"cannot be made\. The disk is full"):
        Environment(tmp_path / ".venv").make()


def test_pip_comes_from_python_or_by_the_pip_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(Environment, "_run", lambda _self, command: ran.append(command))
    old = made(tmp_path / ".venv")
    old._install_pip(os.fsencode(old.folder))
    assert ran == [], "its launcher names this folder"
    record = unpacked(old, "pip")
    old._install_pip(b"/renamed/.venv")
    assert ran.pop() == [str(old.python), "-m", "ensurepip", "--default-pip"]
    assert not record.exists(), "else pip would be found there, and its launcher stay as it is"
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    old._install_pip(b"/renamed/.venv")
    assert ran.pop()[1:] == ["-m", "pip", "--python", str(old.python), "install", "pip"]


def test_damaged_packages_are_forgotten(tmp_path: Path) -> None:
    environment = made(tmp_path / ".venv")
    records = {name: unpacked(environment, name) for name in ("good", "half", "lost", "bare")}
    (records["half"] / "INSTALLER").unlink()
    (records["lost"].parent / "lost/__init__.py").unlink()
    (records["bare"] / "RECORD").unlink()
    with (records["good"] / "RECORD").open("a") as file:
        file.write("good/__pycache__/__init__.pyc,,\n")
    assert [name for name in records if is_whole(records[name])] == ["good"]
    (environment.folder / "lib64").unlink(missing_ok=True)
    (environment.folder / "lib64").symlink_to("lib")  # as Python makes it on Linux
    assert environment.make().endswith("damaged packages forgotten: 3")
    assert [name for name in records if records[name].is_dir()] == ["good"]


@pytest.mark.parametrize("name", ["renamed", "renamed, with spaces and ümlauts", "n" * 120])
def test_after_a_move_its_launchers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    uv = pytest.importorskip("uv").find_uv_bin()
    monkeypatch.setattr(Environment, "_install_pip", lambda *_: None)
    old = Environment(tmp_path / "old" / ".venv")
    old.folder.parent.mkdir()
    assert old.make() == "made"
    add_wheel(tmp_path, "tool", "1.0", script="tool = tool:main")
    wheel = next((tmp_path / "tool").glob("*.whl"))
    command = [uv, "pip", "install", "--offline", "--python", str(old.python), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "old").rename(tmp_path / name)
    moved = Environment(tmp_path / name / ".venv")
    assert moved.make().startswith("kept")
    tool = [str(moved.python.parent / "tool"), "a b"]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert done.stdout == f"{moved.folder} a b\n"
    activate = f". '{moved.python.parent}/activate' && command -v tool"
    done = subprocess.run(["sh", "-c", activate], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tool[0]


def test_a_shared_environment_behind_a_link_keeps_its_own_place(tmp_path: Path) -> None:
    shared = made(tmp_path / "one" / ".venv")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/.venv").symlink_to(shared.folder)
    assert Environment(tmp_path / "two" / ".venv").make().startswith("kept")
    assert str(tmp_path / "two") not in (shared.folder / "bin/activate").read_text()


def test_what_can_be_imported_is_listed_without_importing(tmp_path: Path) -> None:
    environment = made(tmp_path / ".venv")
    site = environment.sites()[0]
    (site / "single.py").write_text("raise SystemExit('imported')")
    (site / "empty").mkdir()
    assert environment.modules() == {"single"}
