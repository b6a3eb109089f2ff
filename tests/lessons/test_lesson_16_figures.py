"""Figures of runs that fail: what they refuse, and what they say."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_16.failures import draw_days, draw_forgotten, draw_goodput
from utils.views import Span


def texts(figure) -> list[str]:
    found = [axes.get_title("left") + axes.get_title() for axes in figure.axes]
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return found + legends + [text.get_text() for text in figure.texts]


def test_days_have_a_legend_of_what_is_there() -> None:
    figure = draw_days({"a": [Span("work", 0, 86_400), Span("lost", 86_400, 90_000)]}, title="T")
    assert {"work", "lost"} <= set(texts(figure)), "kinds in the legend"
    assert "waiting" not in texts(figure), "nothing waited"
    assert figure.axes[0].get_xlabel() == "days", "unit of the axis"
    with pytest.raises(ValueError, match="draws spans of the kinds work"):
        draw_days({"a": [Span("sleeping", 0, 1)]}, title="T")
    with pytest.raises(ValueError, match="draws spans"):
        draw_days({}, title="T")


def test_goodput_marks_the_best() -> None:
    curve = {60.0: 0.5, 600.0: 0.9, 6000.0: 0.7}
    figure = draw_goodput({"low": {600.0: [0.85, 0.95]}}, {"low": curve}, title="T")
    star = next(line for line in figure.axes[0].lines if line.get_marker() == "*")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (600.0, 0.9), "the highest of the formula"
    with pytest.raises(ValueError, match="the same simulated and by formula"):
        draw_goodput({"low": {}}, {"high": curve}, title="T")


def test_forgotten_pieces_count_the_steps_that_differ() -> None:
    figure = draw_forgotten([3.0, 2.0, 1.0], {"nothing": [1.0], "scaler": [1.5]}, 2, title="T")
    found = texts(figure)
    assert "nothing: 0" in found and "scaler: 1, by up to 0.50" in found, found
    with pytest.raises(ValueError, match="runs of 1 steps after step 2"):
        draw_forgotten([3.0, 2.0, 1.0], {"nothing": [1.0, 2.0]}, 2, title="T")
