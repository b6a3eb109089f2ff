"""What the course changes in a Colab kernel: nothing that is there, torch never."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils import colab


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A repository that needs four packages."""
    needs = '["torch>=2.11", "numpy>=2.0", "cloudpickle>=3.1", "jupyterlab>=4.4"]'
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {needs}\n")
    return tmp_path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1 if "fails" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def has(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colab, "installed", versions.get)


def test_adds_only_what_is_missing(
    course: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    has({"torch": "2.15.0+cu126", "numpy": "2.4.6"}, monkeypatch)
    colab.prepare(course)
    assert len(pip) == 1
    assert pip[0][-2:] == ["--no-deps", "cloudpickle"]


def test_touches_nothing_where_all_is_there(
    course: Path,
    pip: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    has({"torch": "2.11.0+cu126", "numpy": "2.0.2", "cloudpickle": "3.1.1"}, monkeypatch)
    colab.prepare(course)
    assert (pip, capsys.readouterr().out) == ([], "")


def test_an_older_torch_is_said_and_kept(
    course: Path,
    pip: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    has({"torch": "2.9.0+cu126", "numpy": "2.0.2", "cloudpickle": "3.1.1"}, monkeypatch)
    colab.prepare(course)
    assert pip == []
    assert "Colab has torch 2.9.0+cu126; the course was written for 2.11" in capsys.readouterr().out


def test_a_failing_pip_says_how_to_see_why(
    pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    colab.add(["fails"])
    assert "!pip install --no-deps fails" in capsys.readouterr().out


def test_versions_compare_as_numbers() -> None:
    assert colab.numbers("2.9.0") < colab.numbers("2.11") < colab.numbers("2.15.0+cu132")
