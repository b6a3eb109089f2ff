"""`make course` on a course of three small notebooks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import course  # noqa: E402

from utils.units import GIB  # noqa: E402


def write(path: Path, *cells: str) -> None:
    """A notebook of code cells."""
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)


@pytest.fixture
def small_course(tmp_path: Path) -> Path:
    """A lesson that passes, its solution that fails, and the start, which comes first."""
    row = {
        "lesson": "01",
        "what": "a < b",
        "peak_bytes": 12 * 2**20,
        "step_seconds": None,
        "evidence": "measured",
    }
    scored = f"import os; open(os.environ['COURSE_SCOREBOARD'], 'w').write({json.dumps([row])!r})"
    write(tmp_path / "notebooks/beginner/01_a.ipynb", "print(1)", scored)
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
    assert lines[-1] == "build/course/index.html: 2 passed, 1 failed, 0 over budget"

    pages = small_course / "build/course"
    index = (pages / "index.html").read_text(encoding="utf-8")
    assert "<td>a &lt; b</td><td>12.00 MiB</td>" in index
    assert "ValueError: broken here" in index
    assert (pages / "solutions/beginner/01_a.html").is_file()
    stored = nbformat.read(small_course / "notebooks/beginner/01_a.ipynb", as_version=4)
    assert stored.cells[0].outputs == []
    rows = json.loads((pages / "figures.json").read_text(encoding="utf-8"))
    assert [row["notebook"][:9] for row in rows] == ["notebooks", "notebooks", "solutions"]
    assert rows[2]["error"] == "ValueError: broken here"
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 2**20 for row in rows)
    assert not any(row["over_budget"] for row in rows)


def test_rows_over_their_budget_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        course.Run(tmp_path / name, "", seconds, int(gib * GIB), "")
        for name, seconds, gib in [
            ("notebooks/01_slow.ipynb", 91.0, 1.4),
            ("labs/06_large.ipynb", 91.0, 1.6),
            ("notebooks/09_sharding.ipynb", 89.0, 2.4),
        ]
    ]
    over = ["over 1.5 min", "over 1.5 min, over 1.50 GiB", ""]
    assert [row.over_budget for row in rows] == over
    assert [row["over_budget"] for row in json.loads(course.figures(rows, tmp_path))] == over
    page = course.index_page(rows, tmp_path)
    assert [f'<td class="over">{mark}</td>' in page for mark in over] == [True, True, False]
    assert course.summary(rows, tmp_path) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.rpartition("passed")[2] for line in lines] == [f", {over[0]}", f", {over[1]}", ""]
    assert last.endswith("3 passed, 0 failed, 2 over budget")


def test_a_process_that_ends_while_it_is_looked_at_loses_no_other() -> None:
    class Ended:
        def memory_full_info(self) -> None:
            raise psutil.NoSuchProcess(1)

    me = psutil.Process()
    held = course.held_together([Ended(), me, Ended()])
    assert held == pytest.approx(course.held_bytes(me), rel=0.1)


def test_a_course_without_notebooks_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "build/course").mkdir(parents=True)
    assert course.main(tmp_path) == 1


def test_held_bytes_counts_this_process() -> None:
    assert course.held_bytes(psutil.Process()) > 2**20
