"""A learner's progress: what the checks said, counted by lab, as text, table and picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.labs.checking import checks_of, lab_numbers
from utils.labs.scoreboard import note
from utils.labs.verdict import Report, correct, not_yet
from utils.lessons.lesson_00 import progress as page
from utils.lessons.lesson_00.progress import draw_progress, progress


@pytest.fixture(autouse=True)
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "scoreboard.json"
    monkeypatch.setenv("COURSE_SCOREBOARD", str(path))
    return path


def test_each_lab_has_its_exercises_and_each_a_check() -> None:
    labs = {lab.number: lab.exercises for lab in progress().labs}
    assert list(labs) == lab_numbers()
    for number, exercises in labs.items():
        assert len(exercises) >= 3, f"lab {number}"
        assert set(exercises) <= set(checks_of(number)), (
            f"lab {number} asks for what is not checked"
        )


def test_what_is_solved_is_counted_and_what_is_next_is_named() -> None:
    first, second, third = progress().labs[0].exercises[:3]
    note(Report(f"01.{first}", correct()))
    note(Report(f"01.{third}", correct(score="13 calls, par 14")))
    note(Report(f"01.{second}", not_yet("half of it")))
    found = progress()
    lab = found.labs[0]
    assert lab.solved == [first, third] and lab.next == second
    assert f"2 of {sum(len(lab.exercises) for lab in found.labs)} exercises" in found.sentence
    assert f"Next: 01.{second}." in found.sentence
    assert f"{third}: 13 calls, par 14" in str(found)
    boxes = [patch.get_facecolor()[:3] for patch in draw_progress(found).axes[0].patches[:4]]
    assert boxes[0] == boxes[2] and len(set(boxes)) == 3, "solved, tried and open differ"


def test_all_solved_leaves_nothing_next() -> None:
    for lab in progress().labs:
        for name in lab.exercises:
            note(Report(f"{lab.number}.{name}", correct()))
    assert progress().sentence.endswith("That is all of them.")


def test_the_table_leads_to_the_learners_own_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'href="../labs/beginner/01_where_memory_goes.ipynb"' in progress()._repr_html_()
    for folder in ("labs", "my_labs"):
        file = tmp_path / folder / "beginner/01_where_memory_goes.ipynb"
        file.parent.mkdir(parents=True)
        file.write_text((page.ROOT / "labs/beginner/01_where_memory_goes.ipynb").read_text())
    monkeypatch.setattr(page, "ROOT", tmp_path)
    assert 'href="../my_labs/beginner/01_where_memory_goes.ipynb"' in progress()._repr_html_()


def test_a_damaged_scoreboard_is_a_sentence_and_the_labs_stand(board: Path) -> None:
    board.write_text("{")
    found = progress()
    assert "is damaged" in found.sentence and len(found.labs) == len(lab_numbers())
    assert draw_progress(found).axes
