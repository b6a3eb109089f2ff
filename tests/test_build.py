"""The builder on a small course of the tests' own: regions, ids, runs, outputs, findings."""

import shutil
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "sources"))

import build  # noqa: E402
from _findings import budget_findings  # noqa: E402
from _findings import words as count_words  # noqa: E402
from _notebook import Target, make, targets  # noqa: E402
from _outputs import STATE, WIDGET, clean, problems  # noqa: E402
from _regions import SourceError, lab_text, lesson_text, solution_text  # noqa: E402

START = """# %% [markdown]
# # Start
#
# {{badges}}

# %% tags=["setup"]
here = setup("00")

# %%
print(6 * 7)
"""
LAB = """# %% [markdown]
# # Lab 01

# %% tags=["setup"]
here = setup("labs/beginner/01")

# %%
def double(x):
    # BEGIN SOLUTION
    y = 2 * x
    return y
    # END SOLUTION


# BEGIN SOLUTION
answer = double(21)
# END SOLUTION
# STUB: answer = ...
print(answer)

# %% [markdown]
# <details><summary>Hint 1</summary>Twice.</details>
"""


@pytest.fixture
def course(tmp_path):
    """A repository of one lesson and one lab."""
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/units.py").touch()
    (tmp_path / "utils/__init__.py").write_text("def setup(name): print('lesson', name)\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sources/labs/beginner").mkdir(parents=True)
    shutil.copy(ROOT / "sources/bootstrap.py", tmp_path / "sources")
    (tmp_path / "sources/00_start.py").write_text(START)
    (tmp_path / "sources/labs/beginner/01_x.py").write_text(LAB)
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


# Regions


def test_regions_make_a_lab_and_its_solution():
    lab, solution = lab_text(LAB, "lab.py"), solution_text(LAB, "lab.py")
    assert "def double(x):\n    ...  # your code here\n\n\nanswer = ...\nprint(answer)" in lab
    assert "def double(x):\n    y = 2 * x\n    return y\n\n\nanswer = double(21)\nprint" in solution
    for text in (lab, solution):
        assert "SOLUTION" not in text and "STUB" not in text
        compile(text, "text", "exec")


def test_several_stub_lines_and_their_inner_indentation():
    text = "d = {\n    # BEGIN SOLUTION\n    1: 2,\n    # END SOLUTION\n    # STUB: 1: ...,\n    # STUB:   # two\n}\n"
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
        "notebooks/00_start.ipynb", "labs/beginner/01_x.ipynb", "solutions/beginner/01_x.ipynb",
    ]  # fmt: skip
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
    change(course / "sources/00_start.py", "# %%\nprint(6", "# %%\nx = 1\n\n# %%\nprint(6")
    after = ids()
    assert [i for i in after if i in before] == before and len(after) == len(before) + 1


def test_equal_cells_have_different_ids(course):
    with (course / "sources/00_start.py").open("a") as file:
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
    change(course / "sources/00_start.py", old, new)
    with pytest.raises(SourceError, match=words):
        make(targets(course)[0], course)


def test_an_address_that_is_missing_is_said(course):
    change(course / "pyproject.toml", "Repository =", "Homepage =")
    with pytest.raises(SourceError, match="lacks Repository"):
        make(targets(course)[0], course)


# Building: the only tests that start kernels


def test_build_runs_what_changed_and_check_agrees(course, capsys):
    assert build.main([], course) == 0
    lab, solution = (read(course / f"{kind}/beginner/01_x.ipynb") for kind in ("labs", "solutions"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in lab.cells)
    assert solution.cells[-2].outputs[0].text == "42\n"
    assert [c.execution_count for c in solution.cells if c.cell_type == "code"] == [1, 2, 3]
    assert build.main(["--check"], course) == 0

    written = {path: path.stat().st_mtime_ns for path in course.rglob("*.ipynb")}
    change(course / "sources/00_start.py", "# # Start", "# # Start here")  # prose alone
    assert build.main([], course) == 0
    start = course / "notebooks/00_start.ipynb"
    new = {path: path.stat().st_mtime_ns for path in course.rglob("*.ipynb")}
    assert {path for path in new if new[path] != written[path]} == {start}
    assert "ran notebooks/00" not in capsys.readouterr().out.partition("agree")[2]
    assert read(start).cells[-1].outputs[0].text == "42\n"

    broken = 'import warnings\nwarnings.warn("a real one")\nprint'
    change(course / "sources/00_start.py", "print", broken)
    before = start.read_bytes()
    assert build.main([str(course / "sources/00_start.py")], course) == 1
    errors = capsys.readouterr().err
    assert "notebooks/00_start.ipynb: cell 4 (`import warnings`) gave a warning" in errors
    assert "UserWarning: a real one" in errors
    assert start.read_bytes() == before
    assert build.main(["--check"], course) == 1
    assert "00_start.ipynb: differs from sources/00_start.py from cell 4" in capsys.readouterr().err


def test_an_error_or_a_private_folder_fails_the_build(course, capsys):
    lesson = course / "sources/00_start.py"
    change(lesson, "print(6 * 7)", 'print(__import__("os").getcwd())')
    assert build.main([str(lesson)], course) == 1
    assert f"shows {course}, a folder of this machine" in capsys.readouterr().err
    change(lesson, 'print(__import__("os").getcwd())', "1 / 0")
    assert build.main([str(lesson)], course) == 1
    assert "cell 4 (`1 / 0`) ended in ZeroDivisionError" in capsys.readouterr().err
    assert not (course / "notebooks/00_start.ipynb").exists()


def test_unknown_paths_are_refused(course, capsys):
    assert build.main(["nowhere.py"], course) == 1
    assert "nowhere.py is no script" in capsys.readouterr().err


# Findings: on notebooks that say they were run


@pytest.fixture
def built(course):
    """The small course, with outputs written by hand instead of by a kernel."""
    from _notebook import code_sha256

    for target in targets(course):
        notebook = make(target, course)
        if target.is_executed:
            notebook.metadata.course.code_sha256 = code_sha256(notebook)
            output = nbformat.v4.new_output("stream", name="stdout", text="42\n")
            for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
                cell.execution_count, cell.outputs = count, [output]
        (course / target.path).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, course / target.path)
    assert build.main(["--check"], course) == 0
    return course


def alter_stale(notebook):
    notebook.metadata.course.code_sha256 = "0" * 64


def alter_not_run(notebook):
    notebook.cells[-1].execution_count = None


def alter_no_outputs(notebook):
    for cell in notebook.cells[1:]:
        cell.outputs = []


def alter_error(notebook):
    notebook.cells[-1].outputs = [nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])]


def alter_code(notebook):
    notebook.cells[-1].source = "print(43)"


def alter_id(notebook):
    notebook.cells[-1]["id"] = "random"


def alter_tags(notebook):
    notebook.cells[-1].metadata.tags = ["more"]


def alter_kernel(notebook):
    notebook.metadata.kernelspec.name = "julia"


def alter_size(notebook):
    notebook.cells[-1].outputs[0].text = "x" * 1_100_000


def alter_length(notebook):
    notebook.cells.append(nbformat.v4.new_markdown_cell("more"))


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (alter_stale, "stale outputs"),
        (alter_not_run, "cell 4 (`print(6 * 7)`) was not run"),
        (alter_no_outputs, "was not run"),
        (alter_error, "ended in E: v"),
        (alter_code, "stale outputs"),
        (alter_code, "from cell 4 on"),
        (alter_id, "from cell 4 on"),
        (alter_tags, "from cell 4 on"),
        (alter_kernel, "other metadata"),
        (alter_size, "more than 1 MB"),
        (alter_length, "from cell 5 on"),
    ],
)
def test_check_finds_what_was_altered(built, capsys, alter, words):
    path = built / "notebooks/00_start.ipynb"
    notebook = read(path)
    alter(notebook)
    nbformat.write(notebook, path)
    capsys.readouterr()
    assert build.main(["--check"], built) == 1
    assert words in capsys.readouterr().err


def test_check_lists_all_findings(built, capsys):
    (built / "notebooks/00_start.ipynb").write_text("{")
    (built / "labs/beginner/02_gone.ipynb").write_text("{}")
    (built / "solutions/beginner/01_x.ipynb").unlink()
    assert build.main(["--check"], built) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in errors] == [
        "notebooks/00_start.ipynb", "solutions/beginner/01_x.ipynb", "labs/beginner/02_gone.ipynb",
    ]  # fmt: skip


def test_a_lab_with_outputs_is_found(built, capsys):
    path = built / "labs/beginner/01_x.ipynb"
    notebook = read(path)
    notebook.cells[-2].execution_count = 3
    nbformat.write(notebook, path)
    assert build.main(["--check"], built) == 1
    assert "is a lab and has outputs" in capsys.readouterr().err


def test_saving_in_jupyter_is_no_finding(built):
    path = built / "notebooks/00_start.ipynb"
    notebook = read(path)
    notebook.metadata.language_info.version = "3.99"
    notebook.metadata.kernelspec.display_name = "Python 3"
    nbformat.write(notebook, path)
    assert build.main(["--check"], built) == 0


def found_in(kind, *sources):
    """The findings on a notebook of code cells; what begins with # is prose."""
    kinds = {True: nbformat.v4.new_markdown_cell, False: nbformat.v4.new_code_cell}
    cells = [kinds[source.startswith("#")](source) for source in sources]
    path = Path("notebooks/beginner/01_x.ipynb")
    notebook = nbformat.v4.new_notebook(cells=cells)
    return " ".join(budget_findings(notebook, Target(path, path, kind)))


def test_budgets_of_a_lesson():
    assert found_in("lesson", *["x"] * 20, *["# " + "word " * 175] * 20) == ""
    assert "3,520 words" in found_in("lesson", *["x"] * 20, *["# " + "word " * 176] * 20)
    assert "39 cells" in found_in("lesson", *["x"] * 39)
    assert "71 cells" in found_in("lesson", *["x"] * 71)


def test_budgets_of_code_and_hints():
    assert found_in("solution", "x\n" * 10) == ""
    assert "26 lines" in found_in("solution", "x", "x\n" * 26)
    assert "median" in found_in("solution", "x\n" * 11)
    hint = "<summary>Hint</summary>"
    assert found_in("lab", "x", f"## A\n{hint * 3}", f"## B\n{hint * 3}") == ""
    assert "'A' has 4 hints" in found_in("lab", "x", f"## A\n{hint * 2}", f"# {hint * 2}")


def test_words_are_what_is_read():
    assert count_words('Two words. <img alt="a b c"> [third](https://a.b/c d) | -- | 4') == 4


# Outputs


def cell_with(*outputs):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("run()", outputs=list(outputs))])


def stream(name, text):
    return nbformat.v4.new_output("stream", name=name, text=text)


def test_progress_bars_go_and_prints_stay():
    bar = "\r  0%|          | 0/3 [00:00<?, ?it/s]\r100%|###| 3/3 [00:00<00:00, 9.1it/s]\n"
    notebook = cell_with(stream("stderr", f"note\n{bar}last"), stream("stdout", "a\rb\nc\n"))
    clean(notebook)
    assert [output.text for output in notebook.cells[0].outputs] == ["note\nlast", "b\nc\n"]
    notebook = cell_with(stream("stderr", bar))
    clean(notebook)
    assert notebook.cells[0].outputs == []


def test_warnings_are_found_even_behind_a_bar():
    text = " 10%|#   | 1/9 [00:00<00:01]/a/b.py:3: FutureWarning: soon gone\n  call()\n"
    assert problems(cell_with(stream("stderr", text))) == [
        "cell 1 (`run()`) gave a warning: FutureWarning: soon gone"
    ]
    assert problems(cell_with(stream("stderr", "[W1121 06:44:12.1 a.cpp:3] odd\n")))
    assert problems(cell_with(stream("stdout", "Warning: said on purpose\n"))) == []


def test_widgets_of_progress_go_and_others_stay():
    def view(model):
        return nbformat.v4.new_output("display_data", data={WIDGET: {"model_id": model}})

    def model(name, *parts):
        children = [f"IPY_MODEL_{part}" for part in parts]
        return {"model_name": name, "state": {"children": children}}

    notebook = cell_with(view("bar"), view("slider"))
    state = {"bar": model("HBoxModel", "inner"), "inner": model("FloatProgressModel"),
             "slider": model("VBoxModel", "knob"), "knob": model("IntSliderModel")}  # fmt: skip
    notebook.metadata.widgets = {STATE: {"state": state}}
    clean(notebook)
    assert [o.data[WIDGET].model_id for o in notebook.cells[0].outputs] == ["slider"]
    assert set(notebook.metadata.widgets[STATE].state) == {"slider", "knob"}
