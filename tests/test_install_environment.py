"""The environment: kept, made anew, mended after a move, cleaned of damaged packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from index_cases import add_wheel

from utils.installation import environment
from utils.installation.children import Children
from utils.installation.environment import Environment, is_whole, launched_by
from utils.installation.ways_out import SetupError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="its folders have other names there")


@pytest.fixture
def children(tmp_path: Path) -> Children:
    return Children(tmp_path)


def made(folder: Path) -> Environment:
    """An environment without pip, which takes ten times longer to make."""
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    (folder / "pyvenv.cfg").write_text(
        (folder / "pyvenv.cfg").read_text().replace(" --without-pip", "")
    )
    environment = Environment(folder)
    (environment.site_packages()[0] / "pip").mkdir()
    (environment.site_packages()[0] / "pip/__init__.py").touch()
    return environment


def unpacked(environment: Environment, name: str) -> Path:
    """A package as an installer leaves it; its record."""
    site = environment.site_packages()[0]
    add_wheel(site.parents[3] / "wheels", name, "1.0")
    wheel = site.parents[3] / f"wheels/{name}/{name}-1.0-py3-none-any.whl"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    (site / f"{name}-1.0.dist-info/INSTALLER").write_text("uv")
    return site / f"{name}-1.0.dist-info"


def test_one_that_works_is_kept_with_what_is_in_it(tmp_path: Path, children: Children) -> None:
    environment = made(tmp_path / ".venv")
    record = unpacked(environment, "good")
    version = ".".join(map(str, sys.version_info[:2]))
    assert environment.make(children) == f"kept, with its Python {version}"
    assert record.is_dir()
    assert environment.installed("good") == "1.0"
    assert environment.installed("goo") is None


@pytest.mark.parametrize("fault", ["no interpreter", "too old", "without packages"])
def test_one_of_another_python_does_not_work(tmp_path: Path, fault: str) -> None:
    environment = made(tmp_path / ".venv")
    assert environment.works()
    environment.python.unlink()
    if fault == "no interpreter":
        environment.python.symlink_to("/no/such/python")
    else:  # the system's Python was replaced: by an older one, or one that looks elsewhere
        other = "exit 1" if fault == "too old" else f'exec {sys.executable} -I -S "$@"'
        environment.python.write_text(f"#!/bin/sh\n{other}\n")
        environment.python.chmod(0o755)
    assert not environment.works()


def test_one_that_does_not_work_is_made_anew(tmp_path: Path, children: Children) -> None:
    environment = made(tmp_path / ".venv")
    environment.python.unlink()
    assert environment.make(children) == "made anew: the one that was there does not run here"
    assert environment.works()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path, children: Children) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"file/\.venv could not be made"):
        Environment(tmp_path / "file" / ".venv").make(children)


def test_a_disk_that_is_full_already_is_named(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = (1, "Error: Command '[... ensurepip ...]' returned non-zero exit status 1.")
    monkeypatch.setattr(children, "output_of", lambda _command: failed)
    with pytest.raises(SetupError, match="last lines stand above"):
        Environment(tmp_path / ".venv").make(children)
    full = SimpleNamespace(free=16 * 10**6)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _place: full)
    with pytest.raises(SetupError, match=r"could not be made\. The disk is full"):
        Environment(tmp_path / ".venv").make(children)


def test_damaged_packages_are_forgotten(tmp_path: Path, children: Children) -> None:
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
    assert environment.make(children).endswith("damaged packages forgotten: 3")
    assert [name for name in records if records[name].is_dir()] == ["good"]


@pytest.mark.parametrize("name", ["renamed", "renamed, with spaces and ümlauts", "n" * 120])
def test_after_a_move_its_launchers_start(tmp_path: Path, children: Children, name: str) -> None:
    environment = made(tmp_path / "old" / ".venv")
    script = environment.python.parent / "tool"
    body = b"\nimport sys\nprint(sys.prefix, *sys.argv[1:])\n"
    script.write_bytes(launched_by(str(environment.python), b"#!/old/python") + body)
    script.chmod(0o755)
    (tmp_path / "old").rename(tmp_path / name)
    moved = Environment(tmp_path / name / ".venv")
    assert "mended: its folder was renamed" in moved.make(children)
    tool = [str(moved.python.parent / "tool"), "a b"]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    assert done.stdout == f"{moved.folder} a b\n"
    activate = f". '{moved.python.parent}/activate' && command -v tool"
    done = subprocess.run(["sh", "-c", activate], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tool[0]
    assert "mended" not in moved.make(children)  # once is enough


def test_a_shared_environment_behind_a_link_is_not_touched(
    tmp_path: Path, children: Children
) -> None:
    shared = made(tmp_path / "one" / ".venv")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/.venv").symlink_to(shared.folder)
    assert "mended" not in Environment(tmp_path / "two" / ".venv").make(children)


def test_what_can_be_imported_is_listed_without_importing(tmp_path: Path) -> None:
    environment = made(tmp_path / ".venv")
    site = environment.site_packages()[0]
    (site / "single.py").write_text("raise SystemExit('imported')")
    (site / "empty").mkdir()
    assert {"pip", "single"} <= environment.modules()
    assert "empty" not in environment.modules()
    environment.python.unlink()
    assert environment.modules() == set()


def test_only_a_first_line_of_python_is_changed() -> None:
    assert launched_by("/a/python", b"#!/b/python3.11\nx") == b"#!/a/python\nx"
    assert launched_by("/a/python", b"#!/bin/bash\n#!/b/python\n") == b"#!/bin/bash\n#!/b/python\n"
    assert launched_by("/a/python", b"import x\n") == b"import x\n"
    long = launched_by("/a b/python", b"#!/b/python\nx")
    assert launched_by("/a/python", long) == b"#!/a/python\nx"
