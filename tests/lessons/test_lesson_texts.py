"""What a reader of the first lessons meets: the picture early, links that are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from _notebook import BOOTSTRAP  # noqa: E402

FIRST_FIGURE = 8
NOTEBOOKS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("notebooks", "labs", "solutions")
    for path in (ROOT / folder).rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
COUNTS = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
LESSONS = [name for name in NOTEBOOKS if name.startswith("notebooks/") and name.count("/") == 2]
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+?)(#[^)]*)?\)")


def cells(name: str) -> list[nbformat.NotebookNode]:
    return nbformat.read(ROOT / name, as_version=4).cells


def prose(name: str) -> str:
    return "\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")


def source(name: str) -> str:
    """The file to edit, of a notebook."""
    return nbformat.read(ROOT / name, as_version=4).metadata.course.source


@pytest.mark.parametrize("name", LESSONS)
def test_the_first_picture_comes_early(name: str) -> None:
    own = [cell for cell in cells(name) if BOOTSTRAP not in cell.metadata.get("tags", [])]
    shown = [str(cell.get("outputs", "")) for cell in own]
    pictures = [place for place, text in enumerate(shown, 1) if "data:image/png" in text]
    told = f"{source(name)}: show a picture within the first {FIRST_FIGURE} cells"
    assert pictures and pictures[0] <= FIRST_FIGURE, told


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_between_notebooks_lead_somewhere(name: str) -> None:
    links = [(link, place) for link, place in LINK.findall(prose(name)) if link]
    gone = [link for link, _ in links if not ((ROOT / name).parent / link).exists()]
    assert gone == [], f"{source(name)}: these links lead nowhere"
    # A relative link to a notebook opens in JupyterLab and, as an address beside it, in Colab.
    assert [link for link, _ in links if not link.endswith((".ipynb", ".png"))] == []


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name.startswith("labs/")])
def test_a_lab_says_how_many_exercises_it_has(name: str) -> None:
    text = prose(name)
    told = re.search(rf"^({'|'.join(COUNTS)}) exercises?\b", text, re.MULTILINE)
    count = len(re.findall(r"^## Exercise \d", text, re.MULTILINE))
    if told:  # a lab of patients or cases counts them where it shows them
        assert COUNTS.index(told[1]) + 1 == count, f"{name} has {count}, and says {told[0]}"
    else:
        assert not count, f"{name}: say how many exercises it has, as {COUNTS[count - 1]} exercises"


def test_the_glossary_is_a_page_that_lessons_lead_to() -> None:
    page = prose("notebooks/00_glossary.ipynb")
    assert page.count("\n| ") > 70 and not any(
        cell.cell_type == "code" for cell in cells("notebooks/00_glossary.ipynb")
    )
    for name in LESSONS:
        assert "(../00_glossary.ipynb" in prose(name), f"{source(name)}: link ../00_glossary.ipynb"
    assert "(00_glossary.ipynb)" in prose("notebooks/00_start_here.ipynb")
    terms = re.findall(r"^\| (?!term|---)(.+?) \|", page, re.MULTILINE)
    assert len(terms) == len(set(terms)), "a term stands once"
