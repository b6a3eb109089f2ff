"""Figures of lesson 08: what they say, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from utils.lessons.lesson_08.figures import (
    draw_context_memory,
    draw_decoding,
    draw_error_by_bits,
    draw_grid,
    draw_inputs,
    draw_price,
    draw_rates,
)
from utils.units import GIB

ERRORS = {"nearest": {2: [0.2, 0.21, 0.25], 4: [0.04]}, "GPTQ": {2: [0.1], 4: [0.02]}}


def test_the_line_joins_the_middle_of_the_draws() -> None:
    axes = draw_error_by_bits(ERRORS, device="the CPU").axes[0]
    nearest = axes.get_lines()[0]
    assert np.asarray(nearest.get_xdata()).tolist() == [2, 4], "bits from few to many"
    assert np.asarray(nearest.get_ydata()).tolist() == [0.21, 0.04], "the middle one of each draw"
    assert axes.get_yscale() == "log", "factors are read as distances"


def test_a_method_looks_the_same_in_all_figures() -> None:
    one = draw_error_by_bits(ERRORS).axes[0].get_lines()
    other = draw_price({"a model": {"GPTQ": [(4.6, 0.1, 0)], "nearest": [(4.6, 2.0, 0)]}}).axes[0]
    looks = {bar.get_label(): bar[0] for bar in other.containers}
    for line in one:
        same = looks[line.get_label()]
        assert (line.get_color(), line.get_marker()) == (same.get_color(), same.get_marker())


def test_memory_over_context_with_its_cards() -> None:
    lines = {"7B": {"16 + 16": {0: 8 * GIB, 2048: 16 * GIB}}}
    figure = draw_context_memory(lines, {"A100-80GB": 80 * GIB})
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0k", "1k", "2k"], (
        "thousands as k"
    )
    assert "A100-80GB, 80 GiB" in {text.get_text() for text in axes.texts}, (
        "each card's line has its name and size"
    )


def test_weights_and_cache_are_told_apart() -> None:
    figure = draw_context_memory(
        {
            "7B": {"16 + 16": {0: 4 * GIB, 2048: 12 * GIB}},
            "70B": {"16 + 16": {0: 40 * GIB, 2048: 44 * GIB}},
        },
        {"A100-80GB": 80 * GIB},
        weight_bytes={"7B": {"16 + 16": 4 * GIB}, "70B": {"16 + 16": 40 * GIB}},
        trained_tokens=1024,
    )
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["7B", "70B"], "a panel each"
    stars = [
        [line for line in axes.get_lines() if line.get_marker() == "*" and len(line.get_xdata())]
        for axes in figure.axes
    ]
    assert [len(found) for found in stars] == [1, 0], "the 70B's cache stays below its weights"
    (star,) = stars[0]
    assert np.asarray(star.get_xdata()).tolist() == [1024], "4 GiB of weights and 4 of cache"
    assert np.asarray(star.get_ydata()).tolist() == [8], "both together"


def test_a_line_ends_where_the_card_is_full() -> None:
    figure = draw_rates(
        {"4k": {"16 + 16": [(1, 100.0), (3, 200.0)], "4 + 8": [(1, 300.0), (256, 900.0)]}},
        {"4k": 1000.0},
        title="rates",
        full={"4k": ["16 + 16"]},
        crossings={"4k": [(2.9, 150.0)]},
    )
    lines = figure.axes[0].get_lines()
    rings = [line for line in lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert [np.asarray(line.get_xdata()).tolist() for line in rings] == [[2.9]], "one crossing"
    crosses = [
        line
        for line in figure.axes[0].get_lines()
        if line.get_marker() == "X" and len(line.get_xdata())
    ]
    assert [np.asarray(line.get_xdata()).tolist() for line in crosses] == [[3]], "one card is full"


def test_the_planted_channel_stands_beside_the_others() -> None:
    arms = {"as trained": [1.0, 1.2], "planted": [1.0, 36.0]}
    left, right = draw_inputs({"gate, up": ([1.8], [30.0])}, arms, layer="the gate").axes
    assert [np.asarray(line.get_xdata()).tolist() for line in left.get_lines()] == [[1.8], [30.0]]
    assert len(right.get_lines()) == 2, "a line for each arm"


def test_each_weight_goes_to_the_nearest_place() -> None:
    axes = draw_grid([-0.1, 0.26], {2: (0.1, 1)}, title="a group").axes[0]
    ends = {
        tuple(round(float(x), 2) for x in np.asarray(line.get_xdata()))
        for line in axes.get_lines()
        if len(np.asarray(line.get_xdata())) == 2 and float(line.get_linewidth()) < 1
    }
    assert ends == {(-0.1, -0.1), (0.26, 0.2)}, "0.26 is clipped to the last of four places"
    assert "4 places,\n2 bits" in {tick.get_text() for tick in axes.get_yticklabels()}


def test_a_price_stands_over_the_bits_that_are_stored() -> None:
    rows = {"GPTQ": [(4.6, 0.1, 0.05), (2.6, 7.0, 0.3)]}
    axes = draw_price({"a model": rows}, device="the CPU").axes[0]
    line = axes.containers[0][0]
    assert np.asarray(line.get_xdata()).tolist() == [2.6, 4.6], "bits from few to many"
    assert np.asarray(line.get_ydata()).tolist() == [7.0, 0.1], "each beside its own growth"


def test_a_rate_beside_its_bound() -> None:
    figure = draw_decoding(["7B"], [150.0], [105.0])
    assert "105 of 150: 70%" in {text.get_text().strip() for text in figure.axes[0].texts}, (
        "both rates and the share are printed"
    )
    assert any("published" in text.get_text() for text in figure.texts), "the evidence is printed"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: draw_error_by_bits({}), "needs errors"),
        (lambda: draw_error_by_bits({"nearest": {4: []}}), "needs errors"),
        (lambda: draw_price({}), "needs a row"),
        (lambda: draw_price({"a model": {}}), "needs a row"),
        (lambda: draw_grid([], {4: (0.1, 8)}, title=""), "needs weights"),
        (
            lambda: draw_context_memory({"a": {"x": {8: 1.0}}}, {}, weight_bytes={"b": {}}),
            "of the same",
        ),
        (lambda: draw_rates({}, {}, title=""), "one panel or more"),
        (lambda: draw_rates({"a": {"x": [(1, 1.0)]}}, {}, title=""), "a ceiling for each"),
        (lambda: draw_inputs({}, {}, layer=""), "needs ratios"),
        (lambda: draw_context_memory({}, {}), "one model or more"),
        (lambda: draw_decoding(["7B"], [1.0], []), "as many names"),
        (lambda: draw_decoding([], [], []), "as many names"),
    ],
)
def test_nothing_to_draw_ends_in_a_sentence(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
