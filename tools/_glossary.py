"""The rows of the glossary: their words, what these mean, and which lesson shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat

# Everyday words: they mean the glossary's sense only where the text stresses them alone.
EVERYDAY = frozenset({
    "action", "alpha", "axis", "beta", "bubble", "bucket", "capacity", "combine", "device",
    "dispatch", "efficiency", "group", "hierarchical", "host", "kernel", "leak", "link",
    "merging", "moments", "overflow", "overlap", "phase", "queue", "reserved", "ring",
    "schedule", "segment", "simulation", "snapshot", "spare", "stage", "states", "step",
    "storage", "trace", "tree",
})  # fmt: skip
_ROW = re.compile(
    r"^\| (?!term \||-)(?P<terms>[^|]+?) \| (?P<meaning>[^|]+?) \| (?P<shown>[^|]+?) \|$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Row:
    """One line of the glossary's tables, as it is written."""

    terms: str
    meaning: str
    shown: str


def rows(page: Path) -> list[Row]:
    """All rows of the stored page, in its order."""
    cells = nbformat.read(page, as_version=4).cells
    return [Row(**row.groupdict()) for cell in cells for row in _ROW.finditer(cell.source)]


def names(terms: str) -> list[str]:
    """The words of a row: "fp32, fp16" is two, and the 2 of "ZeRO-1, 2" is none."""
    plain = re.sub(r"\([^)]*\)|`|\*", "", terms)
    found = [name.strip() for name in re.split(r"[,;]", plain)]
    return [name for name in found if len(name) > 1 and re.search(r"[^\W\d_]", name)]


def anchor(term: str) -> str:
    """The place of a term on its page."""
    return "term-" + re.sub(r"\W+", "-", term.lower()).strip("-")
