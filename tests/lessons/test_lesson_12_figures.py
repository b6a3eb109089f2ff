"""Tensor-parallel figures: boxes filled where a rank holds something, bytes beside the formula."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.patches import Rectangle

from utils.lessons.lesson_12.tensor_flow import (
    Exchange,
    Held,
    draw_feedforward,
    draw_kept,
    draw_tensor_flow,
)

WAY = [Held("x", "sequence"), Exchange("all-gather"), Held("x", "whole"), Held("Y", "channels")]


def test_a_rank_fills_its_own_part_of_a_box():
    (axes,) = draw_tensor_flow({"one way": WAY}, ranks=2, title="A layer").axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    filled = [box for box in boxes if box.get_linewidth() == 0.5]
    assert len(filled) == 6, "two ranks, three tensors"
    parts, wholes, channels = filled[:2], filled[2:4], filled[4:]
    whole = wholes[0]
    assert [part.get_height() for part in parts] == pytest.approx([whole.get_height() / 2] * 2)
    assert [part.get_width() for part in channels] == pytest.approx([whole.get_width() / 2] * 2)
    assert channels[1].get_x() == pytest.approx(channels[0].get_x() + channels[0].get_width())
    texts = [text.get_text() for text in axes.texts]
    assert {"all-gather", "x", "Y", "rank 0", "rank 1", "one way"} <= set(texts)


def test_a_feedforward_sums_once_or_gathers_and_scatters():
    (axes,) = draw_feedforward().axes
    texts = [text.get_text() for text in axes.texts]
    told = [text.partition("\n")[0].partition(",")[0] for text in texts if "(back:" in text]
    assert told == ["f: nothing", "g: all-reduce", "all-gather", "reduce-scatter"]
    assert [text for text in texts if text in {"A", "C"}] == ["A", "C"] * 2


def test_the_legend_tells_what_a_collective_and_a_passing_tensor_look_like():
    figure = draw_feedforward()
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"a collective", "none in forward"} <= set(told)
    assert "the same, gathered for one product" in told


def test_a_wide_tensor_is_cut_by_columns_and_a_matrix_by_rows():
    way = [Held("A", "columns", 4), Held("C", "rows")]
    (axes,) = draw_tensor_flow({"one way": way}, ranks=2).axes
    a, _, c, below = [p for p in axes.patches if p.get_linewidth() == 0.5]
    assert isinstance(a, Rectangle) and isinstance(c, Rectangle) and isinstance(below, Rectangle)
    assert a.get_width() == pytest.approx(2 * c.get_width()), "half of four widths, and a width"
    assert c.get_height() == pytest.approx(a.get_height() / 2)
    assert below.get_y() == pytest.approx(c.get_y() + 1 + c.get_height()), "rank 1 has lower rows"


@pytest.mark.parametrize(
    ("schemes", "ranks"), [({}, 4), ({"a": WAY}, 1), ({"a": [Held("x", "somehow")]}, 4)]
)
def test_a_flow_that_cannot_be_drawn(schemes: dict[str, Any], ranks: int):
    with pytest.raises(ValueError, match="takes one scheme or more on 2 to 64 ranks"):
        draw_tensor_flow(schemes, ranks=ranks)


def test_terms_add_up_to_a_bar_and_the_measured_stands_beside_it():
    terms = {"norms": 1024.0, "inside": 2048.0}
    figure = draw_kept({"one GPU": 3072}, {"one GPU": terms}, title="Kept", device="cpu")
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches if bar.get_width()]
    assert widths[:3] == pytest.approx([1, 2, 3])
    assert [t.get_text().strip() for t in axes.texts] == ["3 KiB, 100%"]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["norms, predicted", "inside, predicted", "measured"]
    (axes,) = draw_kept({"one": 4096, "two": 3072}, {"one": terms, "two": terms}).axes
    assert axes.texts[1].get_text().strip() == "3 KiB, 75%"
    assert "measured on cpu, predicted" in figure.get_supxlabel()
    with pytest.raises(ValueError, match="the same schemes"):
        draw_kept({"one GPU": 3072}, {"two": terms})
