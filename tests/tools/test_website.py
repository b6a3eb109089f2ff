"""What becomes of a notebook on the site and on slides, without building either."""

from __future__ import annotations

import base64
import json
import posixpath
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import _slide_cells  # noqa: E402
import slides  # noqa: E402
import website  # noqa: E402
from _notebook import targets  # noqa: E402
from _site_notebooks import WIDGET, WIDGET_STATES, Figures, page, prose, slug  # noqa: E402

PNG = base64.b64encode(b"a picture").decode()
IMAGE = f'<img alt="a" src="data:image/png;base64,{PNG}">'


def shows(html: str, **data: object) -> NotebookNode:
    """A code cell with one output."""
    output = nbformat.v4.new_output("display_data", {"text/html": html, "text/plain": "a", **data})
    return nbformat.v4.new_code_cell("draw()", outputs=[output])


def book(*cells: NotebookNode, **metadata: object) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=list(cells), metadata=metadata)


def on_page(notebook: NotebookNode, folder: Path) -> NotebookNode:
    return page(notebook, Path("notebooks/beginner/01.ipynb"), Figures(folder, "_static/figures"))


def test_links_of_the_front_page_lead_to_what_the_site_has() -> None:
    chosen = targets(ROOT)
    there = {target.path.as_posix() for target in chosen} | set(website.guides(ROOT))
    there |= {*website.PAGES, *website.MANUALS, "labs/index.md", "solutions/index.md"}
    there |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.png")}
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", website.front_page(ROOT, chosen))
    assert len(links) > 20, "the front page lists the lessons"
    assert set(links) <= there, f"no page of the site: {sorted(set(links) - there)}"


def test_a_figure_becomes_a_file_that_loads_when_it_is_reached(tmp_path: Path) -> None:
    made = on_page(book(shows(IMAGE + IMAGE)), tmp_path)
    (file,) = tmp_path.glob("*.png")
    assert file.read_bytes() == b"a picture", "one picture is one file"
    shown = made.cells[0].outputs[0].data["text/html"]
    assert shown.count(f'loading="lazy" src="../../_static/figures/{file.name}"') == 2, shown
    assert 'alt="a"' in shown, "its alternative text stays"


def test_a_link_of_an_output_leads_to_the_page_of_the_site(tmp_path: Path) -> None:
    links = '<a href="../labs/a/01_b.ipynb">lab</a> <a href="https://x.org/c.ipynb">elsewhere</a>'
    made = on_page(book(shows(links)), tmp_path)
    shown = made.cells[0].outputs[0].data["text/html"]
    assert 'href="../labs/a/01_b.html"' in shown and 'href="https://x.org/c.ipynb"' in shown


def test_a_widget_stands_as_what_it_showed_last(tmp_path: Path) -> None:
    states = {
        "box": {
            "model_name": "VBoxModel",
            "state": {"children": ["IPY_MODEL_one", "IPY_MODEL_two"]},
        },
        "one": {"model_name": "DropdownModel", "state": {}},
        "two": {"model_name": "HTMLModel", "state": {"value": IMAGE}},
    }
    cell = shows("", **{WIDGET: {"model_id": "box"}})
    made = on_page(book(cell, widgets={WIDGET_STATES: {"state": states}}), tmp_path)
    data = made.cells[0].outputs[0].data
    assert WIDGET not in data and "widgets" not in made.metadata, (
        "no script of widgets is asked for"
    )
    assert "this is what it showed last" in data["text/html"], data
    assert "_static/figures/" in data["text/html"], "its figure is a file, too"


def test_what_is_folded_in_jupyterlab_is_folded_here_too(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("x"), nbformat.v4.new_code_cell("y")]
    cells[1].metadata["jupyter"] = {"source_hidden": True}
    made = on_page(book(*cells), tmp_path)
    assert [cell.metadata.get("tags", []) for cell in made.cells] == [[], ["hide-input"]]


def test_the_bootstrap_and_badges_are_for_notebooks_alone(tmp_path: Path) -> None:
    bootstrap = nbformat.v4.new_code_cell("open_course()", metadata={"tags": ["bootstrap"]})
    title = nbformat.v4.new_markdown_cell("# 01\n\n[![Open in Colab](x)](y)\n\nText")
    made = on_page(book(title, bootstrap), tmp_path)
    assert [cell.source for cell in made.cells] == ["# 01\n\nText"]


@pytest.mark.parametrize(
    ("jupyter", "myst"),
    [
        ("2.-On-paper", "2-on-paper"),
        ("Where-next", "where-next"),
        ("6.-The-pipeline,-executed", "6-the-pipeline-executed"),
        ("%28c%29-NaN,-and-so-on", "c-nan-and-so-on"),
    ],
)
def test_anchors_are_those_of_the_site(jupyter: str, myst: str) -> None:
    assert slug(jupyter) == myst
    assert prose(f"[a](b.ipynb#{jupyter}), [c](https://d/#E-F)") == (
        f"[a](b.ipynb#{myst}), [c](https://d/#E-F)"
    ), "addresses elsewhere keep theirs"
    titled = prose(f'[a](b.ipynb#{jupyter} "the cell")')
    assert titled == f'[a](b.ipynb#{myst} "the cell")', "a title stays, and its link leads on"


def test_links_between_notebooks_lead_to_headings_of_the_site() -> None:
    texts = {target.path.as_posix(): markdown(ROOT / target.path) for target in targets(ROOT)}
    there = {
        path: {
            slug(title.replace(" ", "-"))
            for title in re.findall(r"^#{1,3} (.+?) *$", text, re.MULTILINE)
        }
        for path, text in texts.items()
    }
    lost = []
    for path, text in texts.items():
        for place, anchor in re.findall(r"\]\((?!https?:)([^)\s#]*)#([^)\s]+)", prose(text)):
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(path), place))
                if place
                else path
            )
            if target in there and anchor not in there[target]:
                lost.append(f"{path} -> {place}#{anchor}")
    assert lost == [], "\n".join(lost)


def markdown(path: Path) -> str:
    """The prose of a notebook, without the code that stands in it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def test_the_front_page_leads_to_every_notebook() -> None:
    chosen = targets(ROOT)
    text = website.front_page(ROOT, chosen)
    for target in chosen:
        if target.kind in ("lesson", "page"):
            assert f"\n{target.path.with_suffix('')}\n" in text, f"{target.path} is in the menu"
    for kind in ("lab", "solution"):
        index = website.index_of(kind, chosen)
        assert index.count("/") >= 10, f"all {kind}s are listed"
    assert "<!--" not in text and "](labs)" not in text, "folders lead to their index"


def heading(text: str = "## 1. Idea") -> NotebookNode:
    return nbformat.v4.new_markdown_cell(
        f"{text}\n\nFirst words.\n\nMore words.\n\n| a | b |\n|---|---|\n\n$$x$$"
    )


def kinds(*cells: NotebookNode) -> list[str]:
    made = _slide_cells.slides(book(*cells))
    return [cell.metadata["slideshow"]["slide_type"] for cell in made.cells]


def table(rows: int) -> NotebookNode:
    """A cell that shows a table, of which `text/plain` has one line."""
    shown = f"<thead><tr></tr></thead><tbody>{'<tr><td>1</td></tr>' * rows}</tbody>"
    data = {"text/html": f"<table>{shown}</table>", "text/plain": "<Styler>"}
    return nbformat.v4.new_code_cell(
        "display(table)", outputs=[nbformat.v4.new_output("display_data", data)]
    )


def test_headings_figures_and_short_cells_become_slides() -> None:
    long = nbformat.v4.new_code_cell(
        "\n" * 20, outputs=[nbformat.v4.new_output("stream", text="a")]
    )
    short = nbformat.v4.new_code_cell("1 + 1", outputs=[nbformat.v4.new_output("stream", text="2")])
    silent = nbformat.v4.new_code_cell("x = 1")
    words = nbformat.v4.new_markdown_cell("**Read it.** What it means.")
    assert kinds(heading(), words) == ["slide", "notes", "notes"], "prose is for the speaker"
    assert kinds(shows(IMAGE), short) == ["subslide", "subslide"]
    assert kinds(long, silent) == [], "what a room cannot read is left out"
    rows = _slide_cells.MOST_ROWS
    assert kinds(table(rows)) == ["subslide"]
    assert kinds(table(rows + 1)) == [], "nor is a table drawn too small to be read"
    two = nbformat.v4.new_code_cell("rows", outputs=[*table(rows // 2).outputs] * 2)
    assert kinds(two) == [], "two tables are as long as both, and their heads come on top"


def test_a_slide_keeps_the_first_paragraph_tables_and_formulas() -> None:
    made = _slide_cells.slides(book(heading()))
    assert made.cells[0].source == "## 1. Idea\n\nFirst words.\n\n| a | b |\n|---|---|\n\n$$x$$"
    assert "More words." in made.cells[1].source, "the rest is in the notes"


def test_a_question_stands_before_its_answer_and_a_bet_before_what_came_of_it() -> None:
    asks = nbformat.v4.new_markdown_cell("**Read it.** So.\n\n**Question.** How many bytes?")
    check = nbformat.v4.new_code_cell('bytes_held = ...\ncheck("09.bytes", bytes_held)')
    bet = nbformat.v4.new_markdown_cell("# A lesson\n\nWhy.\n\n## A bet\n\nWords.\n\nYour guess?")
    printed = nbformat.v4.new_output("stream", text="a\n" * 20 + "it is 3; your bet was 2\n")
    came = nbformat.v4.new_code_cell("long()", outputs=[printed])
    made = _slide_cells.slides(
        book(bet, asks, check, came), {"09.bytes": "**3.75**. 2 + 14/8."}.get, {"A bet": "*2 min*"}
    )
    shown = [c.source for c in made.cells if c.metadata["slideshow"]["slide_type"] != "notes"]
    assert shown == [
        "# A lesson\n\nWhy.",
        "## A bet\n\nWords.\n\nYour guess?",
        "**Question.** How many bytes?",
        "**Answer.** **3.75**. 2 + 14/8.",
        "### The bet\n\nit is 3; your bet was 2",
    ]
    notes = [c.source for c in made.cells if c.metadata["slideshow"]["slide_type"] == "notes"]
    assert notes[1].startswith("*2 min*"), "the speaker sees how long it takes"


def test_a_deck_asks_nothing_of_the_network(tmp_path: Path) -> None:
    lesson = "notebooks/00_start_here.ipynb"
    assert slides.main(["--to", str(tmp_path / "slides"), lesson], ROOT) == 0
    text = (tmp_path / "slides/00_start_here.html").read_text(encoding="utf-8")
    scripts = [part.partition('"')[0] for part in text.split('src="')[1:]]
    assert scripts and not [link for link in scripts if "//" in link], scripts
    gone = [link for link in scripts if not (tmp_path / "slides" / link).is_file()]
    assert gone == [], f"these are not beside the deck: {gone}"
    assert text.count("<section") > 8, "the lesson has slides"


def test_slides_of_what_is_no_lesson_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert slides.main(["labs/none.ipynb"], ROOT) == 1
    assert "labs/none.ipynb is no lesson: give a path such as notebooks/" in capsys.readouterr().err


def test_a_site_without_sphinx_names_what_adds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        website.importlib.util, "find_spec", lambda name: None if name == "sphinx" else name
    )
    assert website.main(["--to", str(tmp_path)]) == 1
    assert (
        "needs Sphinx and its theme, which are not in .venv. `make site`" in capsys.readouterr().err
    )
    assert not any(tmp_path.iterdir())


def test_a_decks_links_lead_to_decks_and_what_has_none_is_words() -> None:
    said = (
        '[two](02.ipynb#a) [studio](../advanced/15.ipynb "title") [word](../00_glossary.ipynb#t) '
        "[top](#top) [out](https://a.b/c.ipynb) ![i](a.png) `kernel[grid](x)`"
    )
    made = _slide_cells.linked(
        said, Path("beginner/01.html"), {"beginner/02.html", "advanced/15.html"}
    )
    assert made == (
        "[two](02.html) [studio](../advanced/15.html) word top [out](https://a.b/c.ipynb) "
        "![i](a.png) `kernel[grid](x)`"
    )


def test_a_comment_in_code_begins_no_slide() -> None:
    text = (
        "# On Monday\n\nWrite:\n\n```python\n# before: a model\nmodel = 1\n```\n\n## After\n\nEnd."
    )
    deck = _slide_cells.slides(book(nbformat.v4.new_markdown_cell(text)))
    shown = [c.source for c in deck.cells if c.metadata["slideshow"]["slide_type"] == "slide"]
    assert [source.partition("\n")[0] for source in shown] == ["# On Monday", "## After"]


def test_a_comment_in_code_stands_on_no_slide_as_a_heading() -> None:
    code = "```python\nimport torch\n\n# rows: what the head gets\nx = 1\n\n\n# the end\n```"
    assert _slide_cells.shortened(f"## On Monday\n\nWrite:\n\n{code}\n\n- a list") == (
        "## On Monday\n\nWrite:\n\n- a list"
    )
    assert _slide_cells.shortened(f"## Code alone\n\n{code}") == f"## Code alone\n\n{code}"
