"""The staircase: a point for each peak, a line for each formula, nonsense refused."""

from __future__ import annotations

import pytest
from view_cases import SIZES, texts

from utils.catalog import device
from utils.lessons.lesson_09.staircase import draw_staircase
from utils.units import GB

PEAKS = {"one": {1: SIZES[0], 4: SIZES[1]}, "two": {4: SIZES[2]}}


def test_bars_and_formulas():
    formulas = {"one": {1: 16.0 * GB, 4: 4.0 * GB}, "two": {1: 16.0 * GB, 4: 4.0 * GB}}
    figure = draw_staircase(PEAKS, formulas, limits=("A100-40GB",), title="t")
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == [
        "one\n1 rank", "one\n4 ranks", "two\n4 ranks",
    ]  # fmt: skip
    tops = {}
    for bar in axes.patches:
        tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
    peaks = [m.peak_bytes / GB for m in SIZES[:3]]
    assert [tops[place] for place in sorted(tops)] == pytest.approx(peaks), "a bar ends at its peak"
    *diamonds, card = axes.lines
    assert [line.get_ydata()[0] for line in diamonds] == [16.0, 4.0, 4.0]
    shown = device("A100-40GB").memory_bytes / GB  # 40,441 MiB: more than 40 GB, less than 40 GiB
    assert set(card.get_ydata()) == {shown} and "A100-40GB\nshows 42.4 GB" in texts(figure)
    assert "states by the formula" in texts(figure) and "GB" in axes.get_ylabel()


def test_it_says_what_its_numbers_are():
    figure = draw_staircase(PEAKS, {})
    assert (
        str(SIZES[0].evidence) in figure.get_supxlabel() and "predicted" in figure.get_supxlabel()
    )


@pytest.mark.parametrize("peaks", [{}, {"one": {}}, {str(n): {1: SIZES[0]} for n in range(9)}])
def test_what_cannot_be_drawn(peaks):
    with pytest.raises(ValueError, match="shows 1 to 8 strategies"):
        draw_staircase(peaks, {})
