"""A new lesson: its folder builds and its exercise is judged before a word of it is written."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import new_lesson  # noqa: E402
from _findings import findings  # noqa: E402
from _folders import folder_problems  # noqa: E402
from _notebook import targets  # noqa: E402

import build  # noqa: E402
from utils.labs.verdict import Status  # noqa: E402


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course without lessons."""
    (tmp_path / "sources").mkdir()
    for name in ("pyproject.toml", "sources/bootstrap.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_folder_is_whole_and_says_where_words_are_missing(
    course: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_lesson.make("21", "advanced", " It's new: a lesson ", course)
    assert folder == course / "sources/advanced/21_it_s_new_a_lesson"
    assert {p.name for p in folder.iterdir()} == {
        "lesson.py",
        "lab.py",
        "checks.py",
        "mistakes.py",
        "monday.py",
    }
    assert "# # 21 It's new: a lesson\n" in (folder / "lesson.py").read_text()
    assert folder_problems(course, {folder.relative_to(course)}) == []
    monkeypatch.setattr(build, "execute", lambda *_arguments, **_options: None)
    made = targets(course)
    assert [target.kind for target in made] == ["lesson", "lab", "solution"]
    assert build.build_all(made, course) == []
    told = [
        row.partition(": ")[2] for row in findings(course, made, leftovers=True) if "run" not in row
    ]
    lesson, lab = (f"sources/advanced/{folder.name}/{name}.py" for name in ("lesson", "lab"))
    assert told == [
        f"has 14 cells; a lesson has 25 to 60. Edit {lesson}.",
        f"says TODO. Write your own words there, in {lesson}.",
        *[f"says TODO. Write your own words there, in {lab}."] * 2,
    ]


def test_its_exercise_knows_right_from_wrong(course: Path) -> None:
    folder = new_lesson.make("21", "advanced", "New", course)
    names: dict[str, Any] = {}
    for name in ("checks.py", "mistakes.py"):
        exec((folder / name).read_text(), names)
    check = names["state_bytes"]
    assert check(lambda parameters: 16 * parameters).status is Status.CORRECT
    for one in names["known"].all:
        verdict = check(one.given)
        assert (verdict.status is Status.CORRECT) == one.is_right, one.name
        assert one.says in verdict.nudge, one.name
    assert [names["two_moments"](answer).status for answer in (16, 8)] == [
        Status.CORRECT,
        Status.NOT_YET,
    ]


@pytest.mark.parametrize(
    ("number", "tier", "title", "told"),
    [
        (
            "17",
            "advanced",
            "New",
            "17 is the number of 17_cluster_and_budget: write one that is free",
        ),
        ("7", "advanced", "New", "'7' is no number of a lesson: write two digits"),
        ("21", "expert", "New", "There is no tier 'expert': write one of beginner, intermediate"),
        ("21", "advanced", " ?", "The title ' ?' has no word"),
        ("21", "advanced", 'Say "no"', "marks that tables cannot hold"),
    ],
)
def test_what_cannot_be_made_is_a_sentence(
    number: str, tier: str, title: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new_lesson.main([number, tier, title]) == 1
    assert told in capsys.readouterr().err
    assert not list((ROOT / "sources").glob(f"*/{number}_n*"))


def test_too_few_words_are_answered_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert new_lesson.main(["21"]) == 1
    assert 'such as 21 advanced "Title of it"' in capsys.readouterr().err
