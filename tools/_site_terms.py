"""A Sphinx extension: each word of the glossary leads there at its first use on a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from _glossary import EVERYDAY, anchor, names, rows
from docutils import nodes

GLOSSARY = "notebooks/00_glossary"
_CLOSED = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.math,
           nodes.math_block, nodes.raw, nodes.caption, nodes.thead)  # fmt: skip
_STRESSED = (nodes.emphasis, nodes.strong)


@cache
def glossary(page: Path) -> dict[str, str]:
    """Every term and its meaning, from the stored page."""
    return {name: row.meaning for row in rows(page) for name in names(row.terms)}


def pattern(terms: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the terms, the longest first; a plural counts."""
    longest_first = sorted(terms, key=len, reverse=True)
    choice = "|".join(map(re.escape, longest_first))
    return re.compile(rf"(?<![\w-])(?P<term>{choice})(?P<plural>s?)(?![\w-])", re.IGNORECASE)


class Linker:
    """Links the first use of each term on one page.

    Args:
        terms: Each term with its meaning.
        address: The glossary's address, relative to the page.
    """

    def __init__(self, terms: dict[str, str], address: str) -> None:
        self.terms, self.address = terms, address
        self.by_lower = {term.lower(): term for term in terms}
        self.finds = pattern(terms)
        self.linked: set[str] = set()

    def link(self, doctree: nodes.document) -> None:
        """Put the references into a page."""
        for text in list(doctree.findall(nodes.Text)):
            above = list(lineage(text))
            if any(isinstance(node, _CLOSED) for node in above) or not above:
                continue
            stressed = any(isinstance(node, _STRESSED) for node in above)
            pieces = list(self._pieces(str(text), stressed))
            if len(pieces) > 1 or not isinstance(pieces[0], nodes.Text):
                above[0].replace(text, pieces)

    def _pieces(self, text: str, stressed: bool) -> Iterator[nodes.Node]:
        """The text, with a reference for each term that is met for the first time."""
        start = 0
        for match in self.finds.finditer(text):
            term = self.by_lower[match["term"].lower()]
            if term in self.linked or not _meant(term, match[0], text if stressed else ""):
                continue
            self.linked.add(term)
            if match.start() > start:
                yield nodes.Text(text[start : match.start()])
            yield self._reference(term, match[0])
            start = match.end()
        if start < len(text) or not text:
            yield nodes.Text(text[start:])

    def _reference(self, term: str, shown: str) -> nodes.reference:
        address = f"{self.address}#{anchor(term)}"
        meaning = re.sub(r"[`*$]", "", self.terms[term])
        return nodes.reference("", shown, refuri=address, internal=True, classes=["term"],
                               reftitle=meaning)  # fmt: skip


def _meant(term: str, found: str, stressed: str) -> bool:
    """Whether a word of the text is the glossary's: NCCL is not nccl, and a step may be a stair.

    An everyday word is, where it is stressed alone: *rings*, and not the group of *group norm*.
    """
    if term in EVERYDAY:
        return re.sub(r"^(an?|the) |[.:,]$", "", stressed.strip(), flags=re.IGNORECASE) == found
    return term == term.lower() or found.startswith(term)


def lineage(node: nodes.Node) -> Iterator[nodes.Element]:
    """A node's parents, the nearest first."""
    parent = node.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def name_rows(doctree: nodes.document) -> None:
    """Give each row of the glossary the anchors of its terms."""
    for row in doctree.findall(nodes.row):
        first = next(iter(row.findall(nodes.entry)))
        if not any(isinstance(node, nodes.thead) for node in lineage(row)):
            first["ids"] += [anchor(name) for name in names(first.astext())]


def on_resolved(app: Any, doctree: nodes.document, name: str) -> None:
    """Name the glossary's rows; link the words of every other notebook. `app` is the Sphinx application."""
    if name == GLOSSARY:
        name_rows(doctree)
    elif name.startswith("notebooks/") and GLOSSARY in app.env.found_docs:
        address = app.builder.get_relative_uri(name, GLOSSARY)
        Linker(glossary(Path(app.srcdir) / f"{GLOSSARY}.ipynb"), address).link(doctree)


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", on_resolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
