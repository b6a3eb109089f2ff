"""Lesson 01 as a learner meets it: JupyterLab in a browser, all cells, the slider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from .course import ROOT, browser_page, copy_course, find_browser, jupyter_lab
from .notebook import Notebook

LESSON = "notebooks/beginner/01_where_memory_goes.ipynb"
PICTURES = ROOT / "build/browser"


@pytest.fixture
def browser() -> str:
    """Chromium; without it the test is skipped."""
    if found := find_browser():
        return found
    pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")


@pytest.fixture
def lesson(browser: str, tmp_path: Path) -> Iterator[Notebook]:
    """The lesson, open in JupyterLab on a copy of the course."""
    course = copy_course(tmp_path / "course")
    with (
        jupyter_lab(course, tmp_path / "jupyter") as (server, token),
        browser_page(browser) as page,
    ):
        yield Notebook.open(page, server, token, LESSON)


def test_all_cells_run_and_the_slider_moves_the_figure(lesson: Notebook) -> None:
    lesson.run_all(timeout_s=900)
    lesson.screenshot(PICTURES / "lesson_01_after_run.png")
    assert lesson.errors() == []
    assert len(lesson.images()) > 1

    lesson.move_first_slider()
    lesson.screenshot(PICTURES / "lesson_01_after_slider.png")
    assert lesson.errors() == []
