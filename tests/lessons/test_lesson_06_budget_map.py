"""The lines of what fits a budget: where they meet it, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from view_cases import measured

from utils.lessons.lesson_06.budget_map import draw_budget_map, most_items
from utils.units import GB

LINE = [measured(batch) for batch in (3, 1)]
LOW, HIGH = (run.peak_bytes for run in reversed(LINE))


def test_a_line_meets_the_limit_between_its_points_and_beyond_them() -> None:
    assert most_items(LINE, f"{(LOW + HIGH) // 2}B") == pytest.approx(2, rel=1e-6)
    assert most_items(LINE, f"{HIGH}B") == pytest.approx(3)
    assert most_items(LINE, f"{2 * HIGH - LOW}B") == pytest.approx(5)
    assert most_items(LINE, "1B") == 0, "even a step of nothing is over"


def test_each_crossing_is_named_at_its_line() -> None:
    flat = [dataclasses.replace(run, items=100 * run.items) for run in LINE]
    figure = draw_budget_map({"steep": LINE, "flat": flat}, HIGH, marks={"mine": 2})
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == [f"usable: {HIGH / GB:.1f} GB", "mine"]
    (legend,) = figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["steep: up to 3 images", "flat: up to 300 images"]


def test_a_card_must_hold_what_its_allocator_reserves() -> None:
    reserved = [
        dataclasses.replace(run, allocator_bytes={"reserved peak": 2 * run.peak_bytes})
        for run in LINE
    ]
    assert most_items(reserved, 2 * HIGH) == pytest.approx(3)
    assert most_items(LINE, HIGH) == pytest.approx(3), "no allocator speaks: the tensors"


def test_lines_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="one to four"):
        draw_budget_map({}, "24GB")
    with pytest.raises(ValueError, match="one to four"):
        draw_budget_map(dict.fromkeys("abcde", LINE), "24GB")
    with pytest.raises(ValueError, match="two sizes"):
        draw_budget_map({"one": LINE[:1]}, "24GB")
