"""Words of the glossary are linked where they are first used, and only in its sense."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

from docutils import nodes
from docutils.utils import new_document

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import _site_terms  # noqa: E402
from _site_terms import Linker  # noqa: E402

TERMS = {"peak": "the largest sum", "NCCL": "a library", "ring": "a way", "all-reduce": "a sum"}


def linked(*parts: nodes.Node) -> list[tuple[str, str]]:
    """What is linked in a paragraph, and where to."""
    document = new_document("page")
    document += nodes.paragraph("", "", *parts)
    Linker(TERMS, "glossary.html").link(document)
    return [(ref.astext(), ref["refuri"]) for ref in document.findall(nodes.reference)]


def test_the_first_use_alone_is_linked() -> None:
    text = nodes.Text("Peaks rise; the peak falls.")
    assert linked(text) == [("Peaks", "glossary.html#term-peak")], "plural or not, once"


def test_a_name_is_meant_only_as_it_is_written() -> None:
    assert linked(nodes.Text("nccl is a folder")) == []
    assert linked(nodes.Text("NCCL and an all-reduce")) == [
        ("NCCL", "glossary.html#term-nccl"),
        ("all-reduce", "glossary.html#term-all-reduce"),
    ]


def test_an_everyday_word_is_meant_where_it_is_stressed() -> None:
    assert linked(nodes.Text("a ring of keys")) == []
    assert linked(nodes.emphasis("", "ring")) == [("ring", "glossary.html#term-ring")]
    assert linked(nodes.strong("", "A ring.")) == [("ring", "glossary.html#term-ring")]
    assert linked(nodes.emphasis("", "ring road")) == []


@pytest.mark.parametrize("closed", [nodes.literal, nodes.reference, nodes.title])
def test_code_links_and_headings_stay_as_they_are(closed: type[nodes.TextElement]) -> None:
    assert not [
        shown for shown, address in linked(closed("", "peak", refuri="x")) if address != "x"
    ]


def test_every_row_of_the_glossary_has_words() -> None:
    terms = _site_terms.glossary(ROOT / "notebooks/00_glossary.ipynb")
    assert len(terms) > 100 and all(terms.values()), "each word with its meaning"
    places = [_site_terms.anchor(term) for term in terms]
    assert len(set(places)) == len(places), "each word has a place of its own"
    lost = _site_terms.EVERYDAY - set(terms)
    assert not lost, f"everyday words that the glossary lost: {lost}"
