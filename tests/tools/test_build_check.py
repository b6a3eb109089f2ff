"""What the builder finds wrong with notebooks and keeps of their outputs."""

import sys
from pathlib import Path

import nbformat
import pytest
from build_cases import ROOT, make_course, read

sys.path.insert(0, str(ROOT / "tools"))

from _findings import budget_findings, code_lines
from _findings import words as count_words
from _notebook import Target, code_sha256, make, targets
from _outputs import STATE, WIDGET, clean, problems

import build


@pytest.fixture
def built(tmp_path):
    """The small course, with outputs written by hand instead of by a kernel."""
    course = make_course(tmp_path)
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
    notebook.cells[-1].outputs = [
        nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])
    ]


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
        "notebooks/00_start.ipynb",
        "solutions/beginner/01_x.ipynb",
        "labs/beginner/02_gone.ipynb",
    ]


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
    assert found_in("lesson", *["x"] * 20, *["# " + "word " * 90] * 20) == ""
    assert "1,820 words" in found_in("lesson", *["x"] * 20, *["# " + "word " * 91] * 20)
    assert "24 cells" in found_in("lesson", *["x"] * 24)
    assert "61 cells" in found_in("lesson", *["x"] * 61)
    assert "10 sections" in found_in("lesson", *["x"] * 20, *["## A\n\nword"] * 10)


def test_lines_that_a_reader_sees_are_counted_apart_from_folded_ones():
    assert found_in("lesson", *["x\n" * 10] * 25) == ""
    assert "shows 260 lines of code, more than 250" in found_in("lesson", *["x\n" * 10] * 26)
    cells = [nbformat.v4.new_code_cell("x\n" * n) for n in (3, 4, 5)]
    cells[1].metadata["jupyter"] = {"source_hidden": True}
    cells[2].metadata["tags"] = ["bootstrap"]
    assert code_lines(nbformat.v4.new_notebook(cells=cells)) == (3, 4)


def test_budgets_of_code_and_hints():
    assert found_in("solution", "x\n" * 10) == ""
    assert "26 lines" in found_in("solution", "x", "x\n" * 26)
    assert "median" in found_in("solution", "x\n" * 11)
    hint = "<summary>Hint</summary>"
    assert found_in("lab", "x", f"## A\n{hint * 3}", f"## B\n{hint * 3}") == ""
    assert "'A' has 4 hints" in found_in("lab", "x", f"## A\n{hint * 2}", f"# {hint * 2}")


def test_words_are_what_is_read():
    assert count_words('Two words. <img alt="a b c"> [third](https://a.b/c d) | -- | 4') == 4
    assert count_words("where 2 < 3 the words between stay, so 5 > 4") == 10
    assert count_words("before\n\n```python\nmodel = build()\n```\n\nafter") == 2


# Outputs


def cell_with(*outputs):
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("run()", outputs=list(outputs))]
    )


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
    state = {
        "bar": model("HBoxModel", "inner"),
        "inner": model("FloatProgressModel"),
        "slider": model("VBoxModel", "knob"),
        "knob": model("IntSliderModel"),
    }
    notebook.metadata.widgets = {STATE: {"state": state}}
    clean(notebook)
    assert [o.data[WIDGET].model_id for o in notebook.cells[0].outputs] == ["slider"]
    assert set(notebook.metadata.widgets[STATE].state) == {"slider", "knob"}
