"""The staircase: a point for each peak, a line for each formula, nonsense refused."""

from __future__ import annotations

import pytest
from view_cases import SIZES

from utils.lessons.lesson_09.staircase import draw_staircase
from utils.units import GB

PEAKS = {"one": {1: SIZES[0], 4: SIZES[1]}, "two": {4: SIZES[2]}}


def test_points_and_formulas():
    formulas = {"one": {1: 16.0 * GB, 4: 4.0 * GB}, "two": {1: 16.0 * GB, 4: 4.0 * GB}}
    (axes,) = draw_staircase(PEAKS, formulas, limit="16GB", title="t").axes
    shared, one, two, card = axes.lines
    assert shared.get_label() == "dashed: states by the formula"
    assert [line.get_label() for line in (one, two, card)] == ["one", "two", "16GB card"]
    assert "logarithmic" in axes.get_xlabel() and "logarithmic" in axes.get_ylabel()
    assert list(shared.get_ydata()) == [16.0, 4.0] and list(shared.get_xdata()) == [1, 4]
    assert list(one.get_ydata()) == [m.peak_bytes / GB for m in (SIZES[0], SIZES[1])]
    (left, right), (beside,) = one.get_xdata(), two.get_xdata()
    assert left < 1 < right < 4 < beside, "strategies stand beside each other"
    bars = [c.get_segments()[0] for c in axes.collections if len(c.get_segments()[0])]
    tops = {segment[1][1] for segment in bars if segment[0][0] == segment[1][0]}
    assert tops == {m.peak_bytes / GB for m in SIZES[:3]}, "a bar ends at each peak"
    assert set(card.get_ydata()) == {16.0}
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "4"]


def test_it_says_what_its_numbers_are():
    figure = draw_staircase(PEAKS, {})
    assert (
        str(SIZES[0].evidence) in figure.get_supxlabel() and "predicted" in figure.get_supxlabel()
    )


@pytest.mark.parametrize("peaks", [{}, {"one": {}}, {str(n): {1: SIZES[0]} for n in range(6)}])
def test_what_cannot_be_drawn(peaks):
    with pytest.raises(ValueError, match="shows 1 to 5 strategies"):
        draw_staircase(peaks, {})
