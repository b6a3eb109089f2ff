"""Lanes: bars where the spans are, one look per kind, nonsense refused."""

from __future__ import annotations

import pytest

from utils.views import Span, draw_lanes

LANES = {
    "rank 0": [Span("forward", 5.0, 5.1), Span("backward", 5.3, 5.5)],
    "rank 1": [Span("forward", 5.1, 5.3)],
}


def test_bars_lie_where_the_spans_are() -> None:
    figure = draw_lanes(LANES, title="Two ranks", device="the test's CPU")
    (axes,) = figure.axes
    bars = [(round(b.get_x()), round(b.get_width()), round(b.get_y() + 0.31)) for b in axes.patches]
    assert bars == [(0, 100, 0), (300, 200, 0), (100, 200, 1)]
    assert axes.patches[0].get_facecolor() == axes.patches[2].get_facecolor()
    assert axes.patches[0].get_facecolor() != axes.patches[1].get_facecolor()
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert "measured on the test's CPU" in figure.get_supxlabel()


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ({"rank 0": []}, "nothing to draw"),
        ({"rank 0": [Span("a", 2.0, 1.0)]}, "cannot end before"),
        ({"rank 0": [Span(str(n), 0.0, 1.0) for n in range(6)]}, "tells 5 kinds apart"),
    ],
)
def test_what_cannot_be_drawn(lanes: dict[str, list[Span]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_lanes(lanes, title="")
