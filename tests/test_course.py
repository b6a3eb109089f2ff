"""`make course` on a course of three small notebooks."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "sources"))

import course  # noqa: E402


def write(path: Path, *cells: str) -> None:
    """A notebook of code cells."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)


@pytest.fixture
def small_course(tmp_path: Path) -> Path:
    """A lesson that passes, its solution that fails, and the start, which comes first."""
    board = "def scoreboard(): print('lab 01 < 12 MiB')"
    write(tmp_path / "notebooks/beginner/01_a.ipynb", "print(1)", f"{board}\nscoreboard()")
    write(tmp_path / "notebooks/00_start.ipynb", "x = 1")
    write(tmp_path / "solutions/beginner/01_a.ipynb", "raise ValueError('broken here')", "print(2)")
    return tmp_path


def test_runs_in_order_and_goes_on_after_a_failure(
    small_course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert course.main(small_course) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["00_start" in lines[0], "notebooks/beginner" in lines[1]] == [True, True]
    assert lines[2].endswith("ValueError: broken here")
    assert lines[-1] == "build/course/index.html: 2 passed, 1 failed"

    pages = small_course / "build/course"
    index = (pages / "index.html").read_text(encoding="utf-8")
    assert "lab 01 &lt; 12 MiB" in index
    assert "ValueError: broken here" in index
    assert (pages / "solutions/beginner/01_a.html").is_file()
    stored = nbformat.read(small_course / "notebooks/beginner/01_a.ipynb", as_version=4)
    assert stored.cells[0].outputs == []


def test_a_course_without_notebooks_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "build/course").mkdir(parents=True)
    assert course.main(tmp_path) == 1


def test_held_bytes_counts_this_process() -> None:
    import psutil

    assert course.held_bytes(psutil.Process()) > 2**20
