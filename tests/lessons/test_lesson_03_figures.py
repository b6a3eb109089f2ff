"""Figures of lesson 03: formats, bits and flights show the numbers they are given."""

from __future__ import annotations

import math

import pytest
from view_cases import evidence_of, texts

from utils.lessons.lesson_03.flight import draw_flight, draw_twins, draw_zeros
from utils.lessons.lesson_03.format_figures import draw_bits, draw_formats
from utils.lessons.lesson_03.number_formats import FORMATS
from utils.techniques import NonFinite, Shares, StepRecord
from utils.views import explore


def flight(scales: list[float | None], **changes: object) -> list[StepRecord]:
    """A run with these scales; a step is skipped where the next scale is smaller."""
    return [
        StepRecord(
            step=i,
            loss=2.0 - 0.1 * i,
            scale=scale,
            skipped=bool(later and later < scale),
            grad_norm=1.5,
            step_norm=1.0,
            layers={"a": Shares(0.25, 0, 0), "b": Shares(1, 0, 0)},
            **changes,
        )
        for i, (scale, later) in enumerate(zip(scales, [*scales[1:], None], strict=True))
    ]


def test_a_flight_marks_skipped_steps_at_their_scale() -> None:
    figure = draw_flight(flight([16.0, 8.0, 4.0, 4.0]))
    scale = figure.axes[2]
    (crosses,) = [line for line in scale.lines if "skipped" in str(line.get_label())]
    assert list(crosses.get_xdata()) == [0, 1]
    assert list(crosses.get_ydata()) == [16.0, 8.0]
    assert "2 steps skipped" in texts(figure)
    assert evidence_of(figure) == "measured"


def test_a_flight_without_a_scaler_says_so() -> None:
    assert "no scaler" in texts(draw_flight(flight([None, None])))


def test_the_heat_map_holds_the_shares_and_marks_what_is_not_finite() -> None:
    records = flight([1.0, 1.0])
    records.append(
        StepRecord(
            2,
            math.nan,
            1.0,
            True,
            math.nan,
            None,
            {"a": Shares(0, 0, 0.5)},
            NonFinite("output", "a", (3,)),
        )
    )
    figure = draw_flight(records, title="mine")
    zero, bad = figure.axes[3].images
    assert zero.get_array()[:, :2].tolist() == [[0.25, 0.25], [1.0, 1.0]]
    assert bad.get_array().filled(0).tolist() == [[0, 0, 1], [0, 0, 0]]
    assert "mine\nfirst not finite: step 2, output of a, rows [3]" in texts(figure)


def test_a_loss_that_stands_still_looks_so() -> None:
    low, high = draw_flight(flight([1.0, 1.0])).axes[0].get_ylim()
    assert low == 0 and high > 2


def test_twins_say_which_run_ends_and_where_its_last_norm_is_dead() -> None:
    whole = flight([16.0, 8.0, 8.0])
    broken = [*flight([None, None], first=None), StepRecord(2, math.nan, None, False, math.nan, 1)]
    figure = draw_twins({"fp16": whole, "bf16": broken}, title="mine", mark=(1, "a NaN"))
    labels = [str(line.get_label()) for line in figure.axes[0].lines]
    assert "bf16: NaN from step 2" in labels and "fp16" in labels and "a NaN" in labels
    assert "fp16: last layer's gradients zero" in labels, "layer b's gradient is all zero"
    assert "1 step skipped" in texts(figure) and evidence_of(figure) == "measured"


def test_maps_of_zeros_stand_above_each_other() -> None:
    figure = draw_zeros({"one": flight([None]), "two": flight([None, None])}, title="mine")
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == [
        "one: loss 2.00 to 2.00, 62% of the gradients zero",
        "two: loss 2.00 to 1.90, 62% of the gradients zero",
    ]


def test_an_empty_flight_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_flight([])


def test_formats_are_drawn_to_scale() -> None:
    line, digits = draw_formats().axes
    edges = [(p.get_x(), p.get_x() + p.get_width()) for p in line.patches]
    wanted = [
        pair
        for f in FORMATS.values()
        for pair in ((f.smallest, f.smallest_normal), (f.smallest_normal, f.largest))
    ]
    assert edges == [pytest.approx(pair) for pair in wanted]
    assert list(digits.lines[-1].get_xdata()) == [1, 1.25, 1.5], "fp8 e5m2"
    (near,) = draw_formats(["bf16"], up_to=1.02).axes[1].lines
    assert list(near.get_xdata()) == [1, 1 + 2**-7, 1 + 2**-6]


def test_the_bits_are_those_of_the_number() -> None:
    figure, alt = draw_bits("fp16", 0.1)
    shown = [t.get_text() for t in figure.axes[0].texts if t.get_text() in ("0", "1")]
    assert "".join(shown) == FORMATS["fp16"].encode(0.1)
    assert "The bits hold 0.0999755859" in alt
    assert "2^(11 - 15) x (1 + 614/1024)" in alt


def test_a_flipped_bit_is_worth_what_it_says() -> None:
    assert "-1." in draw_bits("bf16", 1.0, "sign bit")[1]
    assert "the bits hold 1.5." in draw_bits("bf16", 1.0, "first mantissa bit")[1]
    assert "no finite number" in draw_bits("fp16", 1.0, "first exponent bit")[1]
    assert "subnormal" in draw_bits("fp16", 1e-7)[1]


def test_the_explorer_draws_the_same_figure() -> None:
    box = explore(draw_bits, format=["fp16", "bf16"], value=[0.1, 2.0], flip=["no bit"])
    before = box.children[-1].value
    assert draw_bits("fp16", 0.1)[1] in before
    box.children[0].value = "bf16"
    assert draw_bits("bf16", 0.1)[1] in box.children[-1].value


def test_unknown_formats_and_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="no format of the course; take one of fp32"):
        draw_bits("fp17", 1.0)
    with pytest.raises(ValueError, match="take one of no bit"):
        draw_bits("fp16", 1.0, "last bit")
