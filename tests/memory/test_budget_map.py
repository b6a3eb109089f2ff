"""The lines of what fits a budget: where they meet it, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from view_cases import measured

from utils.lessons.lesson_06.budget_map import draw_budget_map, most_items

LINE = [measured(batch) for batch in (4, 1, 2)]
PEAKS = {run.items: run.peak_bytes for run in LINE}


def test_a_line_meets_the_limit_between_its_points_and_beyond_them() -> None:
    between = (PEAKS[2] + PEAKS[4]) // 2
    assert most_items(LINE, f"{between}B") == pytest.approx(3, rel=1e-6)
    assert most_items(LINE, f"{PEAKS[4]}B") == pytest.approx(4)
    beyond = 2 * PEAKS[4] - PEAKS[2]
    assert most_items(LINE, f"{beyond}B") == pytest.approx(6)
    assert most_items(LINE, f"{PEAKS[1] - 1}B") == 0, "its smallest step is over already"


def test_a_crossing_is_named_where_the_figure_shows_it() -> None:
    low = [dataclasses.replace(run, items=100 * run.items) for run in LINE]
    figure = draw_budget_map({"steep": LINE, "flat": low}, f"{PEAKS[2]}B")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["2", "200"]
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"steep", "flat"}
    beyond = draw_budget_map({"one": LINE}, f"{2 * PEAKS[4]}B")
    assert not beyond.axes[0].texts, "it is crossed outside of the figure"


def test_lines_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="one to four"):
        draw_budget_map({}, "24GB")
    with pytest.raises(ValueError, match="one to four"):
        draw_budget_map(dict.fromkeys("abcde", LINE), "24GB")
    with pytest.raises(ValueError, match="two sizes"):
        draw_budget_map({"one": LINE[:1]}, "24GB")
