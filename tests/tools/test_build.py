"""The builder on a small course of the tests' own: regions, cells, ids, runs."""

import sys

import nbformat
import pytest
from build_cases import LAB, ROOT, change, make_course, read

sys.path.insert(0, str(ROOT / "tools"))

from _execute import RunError
from _notebook import make, targets
from _regions import SourceError, lab_text, lesson_text, solution_text

import build
from utils.labs.scoreboard import Row, read_rows, write_rows


@pytest.fixture
def course(tmp_path):
    return make_course(tmp_path)


# Regions


def test_regions_make_a_lab_and_its_solution():
    lab, solution = lab_text(LAB, "lab.py"), solution_text(LAB, "lab.py")
    assert "def double(x):\n    ...  # your code here\n\n\nanswer = ...\nprint(answer)" in lab
    assert "def double(x):\n    y = 2 * x\n    return y\n\n\nanswer = double(21)\nprint" in solution
    for text in (lab, solution):
        assert "SOLUTION" not in text and "STUB" not in text
        compile(text, "text", "exec")


def test_several_stub_lines_and_their_inner_indentation():
    region = "    # BEGIN SOLUTION\n    1: 2,\n    # END SOLUTION\n"
    text = "d = {\n" + region + "    # STUB: 1: ...,\n    # STUB:   # two\n}\n"
    assert lab_text(text, "f") == "d = {\n    1: ...,\n      # two\n}\n"
    assert solution_text(text, "f") == "d = {\n    1: 2,\n}\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("# BEGIN SOLUTION\nx = 1\n", 1, "no # END SOLUTION"),
        ("# BEGIN SOLUTION\n# %%\n# END SOLUTION\n", 1, "in the same cell"),
        ("x = 1\n# END SOLUTION\n", 2, "without # BEGIN"),
        ("# BEGIN SOLUTION\n# BEGIN SOLUTION\n# END SOLUTION\n", 2, "a second"),
        ("# begin solution\nx = 1\n# END SOLUTION\n", 1, "exactly"),
        ("x = 1\n# STUB: x = ...\n", 2, "exactly"),
        ("# %% [markdown]\n# BEGIN SOLUTION\n# END SOLUTION\n", 2, "code cell"),
    ],
)
def test_wrong_markers_are_named_by_file_and_line(text, line, words):
    for build_text in (lab_text, solution_text):
        with pytest.raises(SourceError, match=f"labs/01.py:{line}: .*{words}"):
            build_text(text, "labs/01.py")


def test_a_lesson_has_no_solutions():
    with pytest.raises(SourceError, match="lesson.py:2: only labs"):
        lesson_text("x = 1\n# BEGIN SOLUTION\n", "lesson.py")


# Notebooks


def test_places_bootstrap_badges_and_metadata(course):
    made = {target.path.as_posix(): make(target, course) for target in targets(course)}
    assert list(made) == [
        "notebooks/00_start.ipynb",
        "labs/beginner/01_x.ipynb",
        "solutions/beginner/01_x.ipynb",
    ]
    start = made["notebooks/00_start.ipynb"]
    nbformat.validate(start)
    assert "{{" not in start.cells[0].source
    assert "blob/main/notebooks/00_start.ipynb" in start.cells[0].source
    bootstrap, setup = start.cells[1:3]
    assert bootstrap.metadata.jupyter.source_hidden and len(bootstrap.source.splitlines()) <= 25
    assert setup.source == 'from utils import setup\n\nhere = setup("00")'
    assert start.metadata.kernelspec.name == "python3"


def test_ids_are_deterministic_and_survive_a_cell_put_in_between(course):
    def ids():
        return [cell.id for cell in make(targets(course)[0], course).cells]

    before = ids()
    assert before == ids() and len(set(before)) == len(before)
    change(course / "sources/00_start/lesson.py", "# %%\nprint(6", "# %%\nx = 1\n\n# %%\nprint(6")
    after = ids()
    assert [i for i in after if i in before] == before and len(after) == len(before) + 1


def test_equal_cells_have_different_ids(course):
    with (course / "sources/00_start/lesson.py").open("a") as file:
        file.write("\n# %%\nprint(6 * 7)\n")
    ids = [cell.id for cell in make(targets(course)[0], course).cells]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (' tags=["setup"]', "", 'tagged "setup", and 0 are'),
        ("# %%\nprint", "# %% A title\nprint", "option 'title'"),
        ("# %%\nprint", '# %% tag=["x"]\nprint', "option 'tag'"),
        ("# %%\nprint", "# %% [markdown]\n# {{badges}}\n\n# %%\nprint", "first cell"),
        ("# %%\nprint", "# %% [raw]\n# x\n\n# %%\nprint", "raw cells"),
    ],
)
def test_wrong_sources_are_refused(course, old, new, words):
    change(course / "sources/00_start/lesson.py", old, new)
    with pytest.raises(SourceError, match=words):
        make(targets(course)[0], course)


def test_without_an_address_there_are_no_badges_and_no_gap(course):
    change(course / "pyproject.toml", "Repository =", "Homepage =")
    change(course / "sources/00_start/lesson.py", "# {{badges}}\n", "# {{badges}}\n#\n# Next.\n")
    assert make(targets(course)[0], course).cells[0].source == "# Start\n\nNext."


def test_a_page_is_prose_alone(course):
    (course / "sources/00_words").mkdir()
    page = course / "sources/00_words/page.py"
    page.write_text("# %% [markdown]\n# # Words\n")
    target = next(t for t in targets(course) if t.kind == "page")
    assert target.path.as_posix() == "notebooks/00_words.ipynb" and not target.is_executed
    assert [cell.source for cell in make(target, course).cells] == ["# Words"]
    assert build.main([str(page)], course) == 0
    assert build.main(["--check", str(page)], course) == 0
    page.write_text("# %%\nprint(1)\n")
    with pytest.raises(SourceError, match="a page has no code"):
        make(target, course)


# Building: the only tests that start kernels


def test_build_runs_what_changed_and_check_agrees(course, capsys):
    assert build.main([], course) == 0
    lab, solution = (read(course / f"{kind}/beginner/01_x.ipynb") for kind in ("labs", "solutions"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in lab.cells)
    assert solution.cells[-2].outputs[0].text == "42\n"
    assert [c.execution_count for c in solution.cells if c.cell_type == "code"] == [1, 2, 3]
    assert build.main(["--check"], course) == 0

    written = {path: path.stat().st_mtime_ns for path in course.rglob("*.ipynb")}
    # Prose and address are no reason to run anything again.
    change(course / "sources/00_start/lesson.py", "# # Start", "# # Start here")
    change(course / "sources/bootstrap.py", 'repository=""', 'repository="https://a/b"')
    assert build.main([], course) == 0
    start = course / "notebooks/00_start.ipynb"
    new = {path: path.stat().st_mtime_ns for path in course.rglob("*.ipynb")}
    assert all(new[path] != written[path] for path in new)
    assert "ran " not in capsys.readouterr().out.partition("agree")[2]
    assert read(start).cells[-1].outputs[0].text == "42\n"

    broken = 'import warnings\nwarnings.warn("a real one")\nprint'
    change(course / "sources/00_start/lesson.py", "print", broken)
    before = start.read_bytes()
    assert build.main([str(course / "sources/00_start/lesson.py")], course) == 1
    errors = capsys.readouterr().err
    assert "notebooks/00_start.ipynb: cell 4 (`import warnings`) gave a warning" in errors
    assert "UserWarning: a real one" in errors
    assert start.read_bytes() == before
    assert build.main(["--check"], course) == 1
    assert (
        "00_start.ipynb: differs from sources/00_start/lesson.py from cell 4"
        in capsys.readouterr().err
    )


def test_an_error_or_a_private_folder_fails_the_build(course, capsys):
    lesson = course / "sources/00_start/lesson.py"
    change(lesson, "print(6 * 7)", 'print(__import__("os").getcwd())')
    assert build.main([str(lesson)], course) == 1
    assert f"shows {course}, a folder of this machine" in capsys.readouterr().err
    change(lesson, 'print(__import__("os").getcwd())', "1 / 0")
    assert build.main([str(lesson)], course) == 1
    assert "cell 4 (`1 / 0`) ended in ZeroDivisionError" in capsys.readouterr().err
    assert not (course / "notebooks/00_start.ipynb").exists()


def test_a_lesson_s_own_old_scores_are_left_out(tmp_path):
    board = tmp_path / "scoreboard.json"
    rows = [Row(lesson, "a step", 1, None, "measured") for lesson in ("07", "08")]
    write_rows(board, rows)
    build._leave_out(board, "07")
    assert read_rows(board) == rows[1:]
    board.write_text("{")
    with pytest.raises(RunError, match="damaged"):
        build._leave_out(board, "07")


def test_unknown_paths_are_refused(course, capsys):
    assert build.main(["nowhere.py"], course) == 1
    assert "nowhere.py is no script" in capsys.readouterr().err
