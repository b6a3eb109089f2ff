"""A newcomer's first day in a real browser: start, find, run, solve, look back, hand in; each task timed."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Page

from .course import ROOT, browser_page, copy_course, find_browser, jupyter_lab
from .notebook import Notebook

FIRST_PAGE = "notebooks/00_start_here.ipynb"
SEVEN_BILLION = "06_seven_billion.ipynb"
LESSON = "notebooks/beginner/01_where_memory_goes.ipynb"
LAB = "my_labs/beginner/01_where_memory_goes.ipynb"
PICTURES = ROOT / "build/browser"
ANSWER = """def state_bytes(parameter_count, optimizer):
    kept = {"sgd": 2, "momentum": 3, "adam": 4}
    return 4 * kept[optimizer] * parameter_count


check("01.state_bytes", state_bytes)"""


@dataclass(frozen=True)
class Desk:
    """What the newcomer sits at: a course of their own, JupyterLab's address, and a browser page."""

    course: Path
    server: str
    token: str
    page: Page

    def open(self, path: str) -> Notebook:
        return Notebook.open(self.page, self.server, self.token, path)

    def command(self, *words: str) -> str:
        """What a command in the course's folder prints."""
        done = subprocess.run(
            [sys.executable, *words], cwd=self.course, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    browser = find_browser()
    if not browser:
        pytest.skip("no Chromium on this machine (on Debian: apt install chromium)")
    course = copy_course(tmp_path / "course")
    with (
        jupyter_lab(course, tmp_path / "jupyter") as (server, token),
        browser_page(browser) as page,
    ):
        yield Desk(course, server, token, page)


@contextmanager
def timed(task: str) -> Iterator[None]:
    """Print what a task took: for the reader of the log, nothing is asserted of it."""
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:4.0f} s  {task}")


@pytest.mark.slow
def test_a_newcomers_first_day(desk: Desk) -> None:
    with timed("start: the first page, and its first pictures"):
        first = desk.open(FIRST_PAGE)
        first.run_all(timeout_s=300)
        assert first.errors() == [] and len(first.images()) >= 2
    with timed("find how 7B is fine-tuned on a card of 24 GB"):
        first.follow(SEVEN_BILLION)
        page = first.on(SEVEN_BILLION)
        assert "24 GB" in page.text_of(0)
    with timed("run lesson 01"):
        lesson = desk.open(LESSON)
        lesson.run_all(timeout_s=900)
        assert lesson.errors() == []
    with timed("solve an exercise, in a copy of the lab"):
        desk.command("-m", "utils.labs")
        solve(desk.open(LAB))
    with timed("see the progress"):
        first = desk.open(FIRST_PAGE)
        first.run_all(timeout_s=300)
        told = first.text_of(first.cell_with("mine = progress()"))
        assert re.search(r"\b1 of \d+\b", told), told
        first.screenshot(PICTURES / "newcomer_progress.png")
    with timed("hand in, and find the row in the class's table"):
        assert ("ada", "01", "state_bytes", "correct") in handed_in(desk)


def solve(lab: Notebook) -> None:
    """The first exercise: untouched it is not attempted, then it is correct."""
    exercise = lab.cell_with("def state_bytes(")
    lab.go_to(0)
    lab.run_by_keys(until=exercise + 1)
    assert "not attempted" in lab.text_of(exercise).lower()
    lab.go_to(exercise)
    lab.replace_by_keys(ANSWER)
    lab.run_by_keys(until=exercise + 1)
    lab.screenshot(PICTURES / "newcomer_solved.png")
    assert "correct" in lab.text_of(exercise).lower()
    lab.save()


def handed_in(desk: Desk) -> set[tuple[str, str, str, str]]:
    """What the table of the class says once Ada's scoreboard lies in the folder."""
    folder = desk.course / "handed_in"
    folder.mkdir()
    (folder / "ada.json").write_bytes((desk.course / "my_labs/scoreboard.json").read_bytes())
    desk.command("tools/scores.py", "handed_in")
    with (desk.course / "build/scores.csv").open(newline="") as file:
        return {(r["learner"], r["lesson"], r["what"], r["result"]) for r in csv.DictReader(file)}
