"""Which cells of a lesson become slides, and which of their words the speaker says instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
from nbformat import NotebookNode

MOST_LINES = 12  # of code or printed lines that a room can read
_HEADING = re.compile(r"^#{1,2} ", re.MULTILINE)
_KEPT = re.compile(r"^(\||\$\$|- |\d+\. |!\[|>|<div)")


def slides(notebook: NotebookNode) -> NotebookNode:
    """The deck of a lesson: its headings, figures and short cells; prose goes into the notes.

    Args:
        notebook: A stored lesson with its outputs, prepared as a page of the site is.
    """
    cells = [made for cell in notebook.cells for made in _of_cell(cell)]
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def _of_cell(cell: NotebookNode) -> Iterator[NotebookNode]:
    if cell.cell_type == "markdown":
        yield from _of_prose(cell.source)
    elif has_figure(cell):
        yield _typed(_without_code(cell), "subslide")
    elif is_short(cell):
        yield _typed(cell, "subslide")


def _of_prose(text: str) -> Iterator[NotebookNode]:
    """A heading with its first paragraph, its tables and formulas; all of it in the notes."""
    if _HEADING.search(text):
        yield _typed(nbformat.v4.new_markdown_cell(shortened(text)), "slide")
    yield _typed(nbformat.v4.new_markdown_cell(re.sub(r"^#+ .*\n+", "", text)), "notes")


def shortened(text: str) -> str:
    """The heading, the first paragraph, and every table, list and formula.

    A block that the builder filled stays whole: a table is never cut.
    """
    kept, has_words = [], False
    for block in re.split(r"\n{2,}", text.strip()):
        plain = not block.startswith("#") and not _KEPT.match(block)
        if plain and has_words:
            continue
        has_words = has_words or plain
        kept.append(block)
    return "\n\n".join(kept)


def has_figure(cell: NotebookNode) -> bool:
    """Whether a cell shows a picture."""
    return any("<img" in output.get("data", {}).get("text/html", "") for output in cell.outputs)


def is_short(cell: NotebookNode) -> bool:
    """Whether a room can read a cell's code and what it printed."""
    printed = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    lines = len("\n".join([cell.source, *printed]).splitlines())
    return bool(cell.outputs) and lines <= MOST_LINES and not cell.source.startswith("from utils")


def _without_code(cell: NotebookNode) -> NotebookNode:
    """The figures alone."""
    figures = [o for o in cell.outputs if "<img" in o.get("data", {}).get("text/html", "")]
    made = nbformat.v4.new_code_cell("", outputs=figures[:1], execution_count=None)
    made.metadata["tags"] = ["remove_input"]
    return made


def _typed(cell: NotebookNode, kind: str) -> NotebookNode:
    cell.metadata["slideshow"] = {"slide_type": kind}
    return cell
