"""The glossary holds what lessons say, once each, and leads to the lesson that shows it."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from _glossary import EVERYDAY, Row, anchor, names, rows  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
PAGE = NOTEBOOKS / "00_glossary.ipynb"
ROWS = rows(PAGE)
LESSONS = sorted(path for path in NOTEBOOKS.glob("*/[0-9]*.ipynb"))
LINK = re.compile(
    r"\[(?P<number>\d+a?)(?:, (?:section (?P<section>\d+)|\*(?P<title>[^*]+)\*))?\]"
    r"\((?P<path>[^)]+)\)"
)
MOST = 140


@cache
def sections(lesson: Path) -> dict[str, str]:
    """What stands under each heading of a lesson, prose and code; all of it under ""."""
    found = {"": ""}
    heading = ""
    for cell in nbformat.read(lesson, as_version=4).cells:
        for line in cell.source.splitlines():
            if cell.cell_type == "markdown" and line.startswith("## "):
                heading = line.removeprefix("## ")
            found[heading] = found.get(heading, "") + plain(line)
            found[""] += plain(line) if heading else ""
    return found


def plain(text: str) -> str:
    """A line without its marks, and without the addresses of its links."""
    return re.sub(r"[*`]", " ", re.sub(r"\]\([^)]*\)", "]", text)) + " "


def says(text: str, word: str) -> bool:
    """Whether a text has a word, or its plural; `chunked_loss` says "chunked loss"."""
    spaced = re.escape(word).replace(r"\ ", r"[\s_]+")
    found = rf"(?<![^\W_])(?<!-){spaced}s?(?![^\W_]|-)"
    return re.search(found, text, re.IGNORECASE) is not None


def hints(text: str, word: str) -> bool:
    """Whether a text has a word or a stem of one: a section on sharding may say what is sharded."""
    pieces = [re.sub(r"(ing|ed|ism)$", "", piece) for piece in re.split(r"[ -]", word)]
    stems = [re.escape(piece) for piece in pieces if len(piece) > 3]
    return says(text, word) or any(re.search(rf"\b{stem}", text, re.IGNORECASE) for stem in stems)


def named(lesson: Path, section: str | None, title: str | None) -> list[str]:
    """The texts of a lesson's sections that a link speaks of."""
    known = sections(lesson)
    if not section and not title:
        return [known[""]]
    starts = f"{section}. " if section else ""
    return [text for head, text in known.items()
            if head and head.startswith(starts) and (title or "") in head]  # fmt: skip


def test_it_is_short_enough_to_read() -> None:
    cells = [cell.source for cell in nbformat.read(PAGE, as_version=4).cells]
    asked = re.findall(r"^## (.+)$", "\n".join(cells), re.MULTILINE)
    assert 100 < len(ROWS) <= MOST, f"{len(ROWS)} rows: merge or drop some"
    assert all(heading.endswith("?") for heading in asked), "each group is a question"
    lead = re.compile(r"^## .+\n\n(?!\|).+", re.MULTILINE)
    assert len(lead.findall("\n".join(cells))) == len(asked), "a sentence or two lead in"


def test_no_word_stands_twice() -> None:
    places = [anchor(name) for row in ROWS for name in names(row.terms)]
    assert sorted(set(places)) == sorted(places), "one row and one place for each word"
    assert {name for row in ROWS for name in names(row.terms)} >= EVERYDAY


def test_every_row_is_read() -> None:
    source = nbformat.read(PAGE, as_version=4).cells
    lines = re.findall(
        r"^\| (?!term \|).+$", "\n".join(cell.source for cell in source), re.MULTILINE
    )
    assert len(lines) == len(ROWS), "each row has a word, its meaning and where it is shown"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.terms)
def test_a_lesson_says_and_shows_it(row: Row) -> None:
    words = names(row.terms)
    unsaid = [word for word in words if not any(says(sections(p)[""], word) for p in LESSONS)]
    assert not unsaid, f"no lesson says {unsaid}: drop them"
    links = list(LINK.finditer(row.shown))
    assert links and LINK.sub("", row.shown) in ("", " and "), f"not links alone: {row.shown}"
    said = ""
    for link in links:
        lesson = NOTEBOOKS / link["path"]
        assert lesson in LESSONS and lesson.name.startswith(f"{link['number']}_"), link[0]
        said += sections(lesson)[""]
        texts = named(lesson, link["section"], link["title"])
        assert texts, f"{link[0]}: the lesson has no such section"
        about = link["title"] or any(hints(text, word) for text in texts for word in words)
        assert about, f"{link[0]}: that section says nothing of {words}"
    missing = [word for word in words if not says(said, word)]
    assert not missing, f"{row.shown}: these lessons do not say {missing}"
