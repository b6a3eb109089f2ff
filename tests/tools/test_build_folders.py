"""What the builder says of a lesson's folder that is not whole: the file, and the cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from build_cases import ROOT, make_course

sys.path.insert(0, str(ROOT / "tools"))

from _folders import folder_problems, lesson_folders

import build
from utils.lessons import folders

LESSON = Path("sources/beginner/01_x")
FILES = {
    "lab.py": 'check("01.double", double)\n',
    "checks.py": "def double(answer): ...\n",
    "mistakes.py": 'known.mistakes("double", half=(0, "twice"))\n',
}


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course whose lesson has an exercise."""
    make_course(tmp_path)
    with (tmp_path / LESSON / "lab.py").open("a") as lab:
        lab.write("\n# %%\n" + FILES["lab.py"])
    for name in ("checks.py", "mistakes.py"):
        (tmp_path / LESSON / name).write_text(FILES[name])
    return tmp_path


def test_the_course_of_today_is_whole() -> None:
    folders = {path.relative_to(ROOT) for path in lesson_folders(ROOT)}
    assert len(folders) > 15 and folder_problems(ROOT, folders) == []


def test_the_lessons_are_those_that_python_finds() -> None:
    found = {path.name.partition("_")[0]: path for path in lesson_folders(ROOT)}
    assert found == folders(ROOT / "sources")


def test_a_whole_folder_has_no_problem(course: Path) -> None:
    assert folder_problems(course, {LESSON}) == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("checks.py", None, "checks.py is missing, and lab.py asks for 'double'. Write its check"),
        ("mistakes.py", None, "mistakes.py is missing. Write `known = KnownAnswers()`"),
        ("checks.py", "def halve(answer): ...", "checks.py has no 'double', for which lab.py asks"),
        ("mistakes.py", 'known.rights("double", a=1)', "mistakes.py has no mistake of 'double'. Name one"),
        ("lab.py", 'check("02.double", double)', 'lab.py: check("02.double", ...) is of another lesson'),
        ("checks.py", "from ..other import double", "checks.py imports ..other, which is no part"),
        ("checks.py", "import utils.lessons.lesson_02.x as double", "imports utils.lessons.lesson_02.x"),
        ("checks.py", "import utils.lessons.lesson_01.x as double", "Write it with dots: .x."),
        ("mistakes.py", "from utils.lessons import lesson_02", "utils.lessons.lesson_02, which is no"),
        ("mistakes.py", "known = (\n", "mistakes.py:1: Python cannot read this line"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_told_file_and_cure(
    course: Path, name: str, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = course / LESSON / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text + "\n")
    assert any(words in problem for problem in folder_problems(course, {LESSON}))
    assert build.main(["--check"], course) == 1
    assert words in capsys.readouterr().err
    assert folder_problems(course, set()) == [], "what was not chosen is not told"


def test_an_import_from_its_own_folder_is_none_of_anothers(course: Path) -> None:
    (course / LESSON / "more").mkdir()
    (course / LESSON / "more/plans.py").write_text("from ..checks import double\n")
    assert folder_problems(course, {LESSON}) == []


def test_a_folder_without_any_script_is_told_what_to_write(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (course / LESSON / "lab.py").unlink()
    assert build.main(["--check"], course) == 1
    assert "Write one of them, or remove the folder." in capsys.readouterr().err


def test_two_lessons_of_one_number_are_named(course: Path) -> None:
    (course / "sources/intermediate/01_y").mkdir(parents=True)
    (course / "sources/intermediate/01_y/lesson.py").write_text("# %%\n1\n")
    [problem] = folder_problems(course, set())
    assert problem == ("Two lessons have the number 01: sources/beginner/01_x and "
                       "sources/intermediate/01_y. Rename one.")  # fmt: skip


def test_two_of_one_number_are_told_without_a_traceback(tmp_path: Path) -> None:
    """The builder as a command, where `utils` cannot be imported."""
    (tmp_path / "tools").mkdir()
    for name in ("build.py", "_folders.py"):
        (tmp_path / "tools" / name).write_bytes((ROOT / "tools" / name).read_bytes())
    for name in ("a/01_x", "b/01_y"):
        (tmp_path / "sources" / name).mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, tmp_path / "tools/build.py"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Two lessons have the number 01") and "Trace" not in done.stderr
