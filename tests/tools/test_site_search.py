"""What the site's search shows first: the lesson that speaks most of what was asked."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("snowballstemmer", reason="comes with Sphinx: make site")

from utils.lessons import SOURCES

sys.path.insert(0, str(SOURCES.parent / "tools"))

import _site_search

PAGES = {
    "notebooks/links": "# Links\n\nBandwidth, bandwidth. A pipeline once.",
    "notebooks/pipelines": "# Pipelines\n\nThe pipeline's bubble, the pipeline's stages.",
    "notebooks/start": "# Start\n\nAll pages say start, and start again.",
}


def test_a_word_weighs_most_where_it_is_a_heading_and_said_often() -> None:
    found = _site_search.weights(PAGES)
    assert "pipelin" in found["notebooks/pipelines"], "the stem of pipeline, pipelines, pipeline's"
    assert "pipelin" not in found["notebooks/links"], "said once"
    assert found["notebooks/links"]["bandwidth"] > 0


def test_what_every_page_says_weighs_nothing() -> None:
    pages = {name: f"{text}\n\nThe step, the step." for name, text in PAGES.items()}
    assert all("step" not in words for words in _site_search.weights(pages).values())


def test_two_words_side_by_side_weigh_more_than_apart() -> None:
    beside = {"a": "loss scale, loss scale", "b": "loss, loss, a scale, that scale", "c": ""}
    found = _site_search.weights(beside)
    assert "loss scale" in found["a"] and "loss scale" not in found["b"]
    assert found["a"]["loss scale"] > found["a"]["loss"]


def test_the_script_is_what_sphinx_asks() -> None:
    script = _site_search.scorer(PAGES)
    assert script.startswith("const WEIGHTS = {") and "var Scorer = {" in script
    assert '"notebooks/pipelines":' in script
