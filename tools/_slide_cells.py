"""Which cells of a lesson become slides, and which of their words the speaker says instead."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath

import nbformat
from nbformat import NotebookNode

MOST_LINES = 12  # of code or printed lines that a room can read
MOST_ROWS = 12  # of a table
HEAD_ROWS = 2  # caption and heads of each further table
_HEADING = re.compile(r"^#{1,2} (?P<title>.+)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)  # a comment in it is no heading
_KEPT = re.compile(r"^(\||\$\$|- |\d+\. |!\[|>|<div)")
_BET = re.compile(r"^#{1,2} .*\bbet\b", re.MULTILINE | re.IGNORECASE)
_BET_IS = re.compile(r"\b(bets?)\b")
_QUESTION = re.compile(r"\*\*Question\b.*", re.DOTALL)
_CHECKED = re.compile(r"^check\(\"(?P<name>[^\"]+)\", \w+\)\s*\Z", re.MULTILINE)
_LINK = re.compile(
    r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<page>[^)\s#:]*\.ipynb)?(?P<place>#[^)\s]*)?(?:\s+\"[^\"]*\")?\)"
)
Answers = Callable[[str], str]


def slides(
    notebook: NotebookNode,
    answer: Answers = lambda name: "",
    minutes: Mapping[str, str] | None = None,
) -> NotebookNode:
    """The deck of a lesson: its headings, questions, figures and short cells; prose goes into the notes.

    A question stands on a slide of its own with its answer on the next; a bet stands whole, and what
    came of it has a slide where the lesson prints it.

    Args:
        notebook: A stored lesson with its outputs, prepared as a page of the site is.
        answer: What a room is told after the question of an exercise's name; "" where nothing is.
        minutes: By section's title, how long it takes, for the speaker.
    """
    made: list[NotebookNode] = []
    said = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            said = cell.source
            made += _of_prose(said, minutes or {})
        elif checked := _CHECKED.search(cell.source):
            made += _of_question(said, answer(checked["name"]))
        else:
            made += _of_code(cell)
    return nbformat.v4.new_notebook(cells=made, metadata=notebook.metadata)


def linked(text: str, place: PurePath, decks: Collection[str]) -> str:
    """Prose whose links lead from the deck at `place` to other decks; those to what is none are words."""

    def of_deck(link: re.Match[str]) -> str:
        page = (link["page"] or "").removesuffix(".ipynb") + ".html"
        there = posixpath.normpath((place.parent / page).as_posix())
        return f"[{link['words']}]({page})" if there in decks else link["words"]

    return _LINK.sub(lambda link: of_deck(link) if link["page"] or link["place"] else link[0], text)


def _of_code(cell: NotebookNode) -> Iterator[NotebookNode]:
    if has_figure(cell):
        yield _typed(_without_code(cell), "subslide")
    elif is_short(cell):
        yield _typed(cell, "subslide")
    elif told := of_bets(cell):
        yield _slide(f"### The bet\n\n{told}", "subslide")


def _of_question(said: str, answer: str) -> Iterator[NotebookNode]:
    """The question on the wall, then its answer."""
    asked = _QUESTION.search(said)
    if asked and answer:
        yield _slide(asked[0], "subslide")
        yield _slide(f"**Answer.** {answer}", "subslide")


def of_bets(cell: NotebookNode) -> str:
    """What a cell printed of the lesson's bet, a paragraph a line."""
    lines = "\n".join(o.get("text", "") for o in cell.outputs).splitlines()
    return "\n\n".join(line.strip() for line in lines if _BET_IS.search(line))


def _of_prose(text: str, minutes: Mapping[str, str]) -> Iterator[NotebookNode]:
    """For each heading, itself, its first paragraph, its tables and formulas; all of it in the notes."""
    code = [found.span() for found in _FENCED.finditer(text)]
    found = (heading.start() for heading in _HEADING.finditer(text))
    starts = [at for at in found if not any(begin < at < end for begin, end in code)]
    for begin, end in zip([0, *starts], [*starts, None], strict=True):
        part = text[begin:end].strip()
        if heading := _HEADING.match(part):
            yield _slide(part if _BET.match(part) else shortened(part), "slide")
        if part:
            long = f"{minutes.get(heading['title'].strip(), '')}\n\n" if heading else ""
            yield _slide(long + re.sub(r"^#+ .*\n+", "", part), "notes")


def shortened(text: str) -> str:
    """The heading, the first paragraph, and every table, list and formula.

    A table is never cut: one of more rows than a room can read is left to the notes.
    """
    kept, has_words = [], False
    for block in _paragraphs(text):
        plain = not block.startswith("#") and not _KEPT.match(block)
        if plain and has_words:
            continue
        has_words = has_words or plain
        if len(block.splitlines()) <= MOST_ROWS or not block.startswith("|"):
            kept.append(block)
    return "\n\n".join(kept)


def _paragraphs(text: str) -> list[str]:
    """Parts between empty lines; those inside of code divide nothing, and its comments are no headings."""
    whole = _FENCED.sub(lambda code: re.sub(r"\n(?=\n)", "\n\0", code[0]), text.strip())
    return [part.replace("\0", "") for part in re.split(r"\n{2,}", whole)]


def has_figure(cell: NotebookNode) -> bool:
    """Whether a cell shows a picture."""
    return any("<img" in output.get("data", {}).get("text/html", "") for output in cell.outputs)


def is_short(cell: NotebookNode) -> bool:
    """Whether a room can read a cell's code and what it printed."""
    printed = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    lines = len("\n".join([cell.source, *printed]).splitlines())
    tables = [t for o in cell.outputs if "<tbody" in (t := o.get("data", {}).get("text/html", ""))]
    rows = sum(map(rows_of, tables)) + HEAD_ROWS * max(len(tables) - 1, 0)
    is_room = lines <= MOST_LINES and rows <= MOST_ROWS
    return bool(cell.outputs) and is_room and not cell.source.startswith("from utils")


def rows_of(shown: str) -> int:
    """How many rows a table of HTML has below its heads."""
    return shown.partition("<tbody")[2].count("<tr")


def _without_code(cell: NotebookNode) -> NotebookNode:
    """The figures alone."""
    figures = [o for o in cell.outputs if "<img" in o.get("data", {}).get("text/html", "")]
    made = nbformat.v4.new_code_cell("", outputs=figures[:1], execution_count=None)
    made.metadata["tags"] = ["remove_input"]
    return made


def _slide(text: str, kind: str) -> NotebookNode:
    return _typed(nbformat.v4.new_markdown_cell(text), kind)


def _typed(cell: NotebookNode, kind: str) -> NotebookNode:
    cell.metadata["slideshow"] = {"slide_type": kind}
    return cell
