"""The map of what fits a budget: its cells, its crosses, its refusals."""

from __future__ import annotations

import pytest
from view_cases import measured

from utils.lessons.lesson_06.budget_map import draw_budget_map
from utils.units import MB

GRID = {
    (length, batch): measured(batch * length // 128) for length in (128, 256) for batch in (1, 2)
}


def test_every_cell_shows_its_peak_and_a_cross_where_it_is_over() -> None:
    limit = GRID[256, 1].peak_bytes
    figure = draw_budget_map({"one": GRID, "two": GRID}, f"{limit}B")
    assert len(figure.axes) == 2
    for axes in figure.axes:
        texts = [text.get_text() for text in axes.texts]
        assert len(texts) == 4
        over = ["\N{MULTIPLICATION SIGN}" in text for text in texts]
        assert over == [False, False, False, True], "only 2 x 256 is over; the limit itself fits"
        assert [label.get_text() for label in axes.get_yticklabels()] == ["128", "256"]
    assert GRID[256, 2].peak_bytes > limit > 100 * MB


def test_grids_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="same sequence lengths"):
        draw_budget_map({}, "24GB")
    smaller = {key: value for key, value in GRID.items() if key != (256, 2)}
    with pytest.raises(ValueError, match="same sequence lengths"):
        draw_budget_map({"one": GRID, "two": smaller}, "24GB")
    with pytest.raises(ValueError, match="same sequence lengths"):
        draw_budget_map({"one": {}}, "24GB")
