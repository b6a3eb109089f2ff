"""Lessons where Colab would run them: its versions and folder, google.colab, no .venv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import colab_room  # noqa: E402


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="Colab clones, and this is no clone")
def test_the_set_up_cells_of_all_notebooks_run_and_leave_torch_alone() -> None:
    paths = colab_room.notebooks()
    found = colab_room.run_first(paths)
    assert len(found) == len(paths) > 30, "every lesson and lab was tried"
    errors = {name: run["error"] for name, run in found.items() if run["error"]}
    assert errors == {}, f"set-up cells failed: {errors}"
    installs = {name for run in found.values() for name in run["installs"]}
    assert installs == {"bitsandbytes", "deepspeed"}, (
        f"only what Colab lacks is added, without its dependencies, not {sorted(installs)}"
    )


def test_a_new_dependency_is_looked_up_in_colabs_list() -> None:
    kept = {"torch", "torchvision", "jupyterlab", "jupytext", "nbclient", "nbconvert"}
    lacking = set(colab_room.dependencies()) - set(colab_room.brought()) - kept
    assert lacking == {"bitsandbytes", "deepspeed"}, (
        f"does Colab publish {sorted(lacking)}? Then colab_versions.txt names it, else it belongs here"
    )


def test_the_published_versions_name_their_source() -> None:
    head = colab_room.VERSIONS.read_text(encoding="utf-8").splitlines()[:3]
    assert "googlecolab/backend-info, pip-freeze.gpu.txt, commit" in head[1], head
    versions = colab_room.brought()
    assert versions["torch"].startswith("2.11."), "the oldest torch that the course takes"
    assert not {"bitsandbytes", "deepspeed"} & versions.keys(), "Colab brings neither"


@pytest.mark.slow
def test_lessons_run_with_colabs_versions_and_say_what_they_skip(tmp_path: Path) -> None:
    names = ("intermediate/06_seven_billion", "intermediate/09_sharding")  # `make colab` runs all
    paths = [str(ROOT / f"notebooks/{name}.ipynb") for name in names]
    told = ""
    for step in (["make", "env"], ["whole", "env", *paths]):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/colab_room.py"), *step],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        told = done.stdout
    for name in names:
        first = told.partition(name)[2].splitlines()[1:2]
        assert first and first[0].startswith("    "), f"{name} says what it skips, not: {told}"


def test_what_cannot_be_installed_or_cloned_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_folder: Path) -> None:
        raise subprocess.CalledProcessError(2, ["uv"])

    monkeypatch.setattr(colab_room, "ROOT", tmp_path)
    assert colab_room.main(["first"]) == 1
    assert "this copy is no clone: git clone it first." in capsys.readouterr().err
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(colab_room, "make", fail)
    assert colab_room.main(["make", str(tmp_path / "env")]) == 1
    assert "They could not be installed, for the reason above." in capsys.readouterr().err


def test_no_kernel_is_left_after_its_notebook(tmp_path: Path) -> None:
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin/python").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m ipykernel_launcher -f "$4"\n'
    )
    (env / "bin/python").chmod(0o755)
    code = "import os\nprint('skipped: pid', os.getpid())"
    for last in ("", "1 / 0"):
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (code, last)])
        nbformat.write(book, tmp_path / "01.ipynb")
        error, (said,) = colab_room.run_whole(env, tmp_path / "01.ipynb", tmp_path)
        assert error == ("ZeroDivisionError: division by zero" if last else "")
        assert not psutil.pid_exists(int(said.split()[-1]))
