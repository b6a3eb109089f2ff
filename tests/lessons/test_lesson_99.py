"""The capstone's prose: every link leads to a cell, with an output, that holds what the link names."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from utils.lessons.lesson_99.sayings import Saying, draw_sayings
from utils.units import Evidence

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "notebooks/advanced/99_capstone.ipynb"
FOLKLORE = ROOT / "notebooks/00_folklore.ipynb"
LAB = ROOT / "sources/advanced/99_capstone/lab.py"
LINK = re.compile(r'\]\(([^)#\s]+\.ipynb)#(\S+?) "([^"]+)"\)')
ROWS_OF_FOLKLORE, QUESTIONS, SCENARIOS = 26, 9, 12


@functools.cache
def sections(path: Path) -> dict[str, list[str]]:
    """By anchor, the code cells with an output below a heading, up to the next heading."""
    found: dict[str, list[str]] = {}
    anchor = ""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
                anchor = title.strip().replace("`", "").replace(" ", "-")
                found.setdefault(anchor, [])
        elif anchor and cell.outputs and "check(" not in cell.source:  # a question proves nothing
            found[anchor].append(cell.source)
    return found


def prose(page: Path = LESSON) -> list[str]:
    cells = nbformat.read(page, as_version=4).cells
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def answers() -> dict[str, tuple[str, str]]:
    """By heading, what one would say, and where that is shown."""
    found = {}
    for text in prose():
        for part in re.split(r"^### ", text, flags=re.MULTILINE):
            if re.match(r"Q\d\.", part):
                title, _, rest = part.partition("\n")
                _, said, shown = rest.strip().split("\n\n")
                found[title] = (re.sub(r"\s+", " ", said), shown)
    return found


def rows() -> list[str]:
    """The folklore: rows of three cells."""
    lines = "\n".join(prose(FOLKLORE)).splitlines()
    table = [line for line in lines if re.match(r"\| (?!often said|---)", line)]
    return [line for line in table if line.count(" | ") == 2]


ALL = sorted(
    {
        (page, *link)
        for page in (LESSON, FOLKLORE)
        if page.is_file()
        for text in prose(page)
        for link in LINK.findall(text)
    }
)


@pytest.mark.parametrize(("page", "path", "anchor", "names"), ALL, ids=lambda part: str(part)[-40:])
def test_a_link_leads_to_a_cell_that_was_run(
    page: Path, path: str, anchor: str, names: str
) -> None:
    notebook = (page.parent / path).resolve()
    assert notebook.is_file(), f"{path} is not there"
    there = sections(notebook)
    assert unquote(anchor) in there, (
        f"{path} has no heading {unquote(anchor)!r}; it has {list(there)}"
    )
    cells = there[unquote(anchor)]
    assert any(names in source for source in cells), (
        f"no cell with an output below {anchor} has {names!r}"
    )


def test_every_row_of_folklore_has_a_cell() -> None:
    table = rows()
    assert len(table) == ROWS_OF_FOLKLORE, len(table)
    assert [row for row in table if not LINK.search(row)] == []


def test_every_sentence_of_every_answer_has_a_cell() -> None:
    """What is said holds no link; below it stand at least as many as it has sentences."""
    found = answers()
    assert len(found) == QUESTIONS, list(found)
    for question, (said, shown) in found.items():
        sentences = re.split(r"(?<=[.?!]) (?=[A-Z`\d])", said)
        links = LINK.findall(shown)
        assert not LINK.search(said) and len(sentences) >= 4, question
        assert shown.startswith("*Shown in* ") and len(links) >= len(sentences), question


def test_links_name_what_stands_in_one_section_only_once_read() -> None:
    """The anchor is that of a heading: no two of one notebook are alike among those linked."""
    for notebook in {(page.parent / path).resolve() for page, path, *_ in ALL}:
        if not notebook.is_file():
            continue
        titles = [
            title.strip()
            for cell in nbformat.read(notebook, as_version=4).cells
            if cell.cell_type == "markdown"
            for title in re.findall(
                r"^#+ (.+)$", re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL), re.MULTILINE
            )
        ]
        linked = {
            unquote(anchor)
            for page, path, anchor, _ in ALL
            if (page.parent / path).resolve() == notebook
        }
        twice = {t for t in titles if titles.count(t) > 1 and t.replace(" ", "-") in linked}
        assert twice == set(), f"{notebook}: {twice}"


def test_sayings_are_drawn_by_how_far_off_they_are() -> None:
    rows = [Saying("a", 2, 1, "GB", Evidence.PREDICTED), Saying("b", 1, 4, "%", Evidence.PUBLISHED)]
    (axes,) = draw_sayings(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a"]
    assert {text.get_text() for text in axes.texts} == {
        "said 2, right 1 GB (predicted)",
        "said 1, right 4 % (published)",
    }
    with pytest.raises(ValueError, match="numbers above zero"):
        draw_sayings([])
    with pytest.raises(ValueError, match="numbers above zero"):
        draw_sayings([rows[0]._replace(right=0.0)])


def test_each_scenario_has_an_end_a_file_and_a_case() -> None:
    (text,) = (part for part in prose() if part.startswith("## 3. The scenarios"))
    lab = LAB.read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][
        1:
    ]
    assert len(table) == SCENARIOS
    for scenario, ends, file, case in table:
        links = LINK.findall(ends)
        assert links and f"hand_in({case.replace('`', chr(34))}" in lab, scenario
        pages = [(LESSON.parent / path).resolve() for path, *_ in links]
        written = [said for page in pages for said in _written(page)]
        assert any(file.strip("`") in each for each in written), f"{scenario}: {file} of {written}"


def _written(page: Path) -> list[str]:
    """What a lesson's outputs say that it wrote into `build/` for its reader."""
    cells = nbformat.read(page, as_version=4).cells
    lines = "\n".join(o.get("text", "") for cell in cells for o in cell.get("outputs", []))
    return re.findall(r"build/(lesson-\d\d[^\s:,]*)", lines)
