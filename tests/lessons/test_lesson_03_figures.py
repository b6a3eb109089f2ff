"""Figures of lesson 03: formats, bits and flights show the numbers they are given."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from matplotlib.text import Annotation
from torch import nn
from view_cases import evidence_of, texts

from utils.lessons.lesson_03.flight import (
    draw_flight,
    draw_gradient_sizes,
    draw_scale,
    draw_twins,
)
from utils.lessons.lesson_03.format_figures import draw_bits, draw_formats
from utils.lessons.lesson_03.network import CLASSES, FEATURES, network, passed_back
from utils.lessons.lesson_03.number_formats import FORMATS
from utils.lessons.lesson_03.opening import healthy_run
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
    assert "ring: last layer's weights get zeros" in labels, "layer b's gradient is all zero"
    assert "1 step skipped" in texts(figure) and evidence_of(figure) == "measured"


def test_a_layer_says_its_share_of_zeros_in_finite_steps() -> None:
    records = flight([1.0, 1.0])
    records[0].layers["a"] = Shares(0.985, 0, 0)
    records[1].layers["a"] = Shares(0.0, 0, 1.0)  # no finite gradient: it has no share of zeros
    labels = [label.get_text() for label in draw_flight(records).axes[3].get_yticklabels()]
    assert labels == ["a  98.5%", "b  100%"]


def test_a_loss_that_comes_back_is_marked_where_it_was_not_finite() -> None:
    records = flight([8.0, 8.0, 8.0])
    records[1] = StepRecord(1, math.nan, 8.0, True, math.nan, None)
    figure = draw_twins({"fp16": records}, title="mine")
    (ticks,) = [line for line in figure.axes[0].lines if "not finite" in str(line.get_label())]
    assert list(ticks.get_xdata()) == [1] and "fp16: loss not finite" in texts(figure)


def test_a_run_that_ends_is_named_at_its_last_loss() -> None:
    broken = [*flight([None, None]), StepRecord(2, math.nan, None, False, math.nan, 1)]
    axes = draw_twins({"fp16": flight([8.0] * 3), "bf16": broken}, title="mine").axes[0]
    (told,) = [text for text in axes.texts if "ends" in text.get_text()]
    assert (
        isinstance(told, Annotation)
        and told.get_text() == "bf16 ends"
        and told.xy == (1, broken[1].loss)
    )
    assert not [line for line in axes.lines if line.get_marker() == "x"], "x is a skipped step"


def test_a_scale_shows_its_search_and_its_skips() -> None:
    figure = draw_scale(flight([16.0, 8.0, 4.0, 4.0, 8.0, 4.0, 4.0]), title="mine")
    (crosses,) = [line for line in figure.axes[0].lines if "skipped" in str(line.get_label())]
    assert list(crosses.get_xdata()) == [0, 1, 4]
    (search,) = [p for p in figure.axes[0].patches if "search" in str(p.get_label())]
    assert (search.get_x(), search.get_x() + search.get_width()) == (-0.5, 1.5)
    assert evidence_of(figure) == "measured"


def test_gradients_below_half_of_the_smallest_number_become_zero() -> None:
    sizes = torch.tensor([2.0**-30, -(2.0**-26), 2.0**-25 * 1.01, 2.0**-10, 0.0])
    assert (sizes.half() == 0).tolist() == [True, True, False, False, True]
    figure = draw_gradient_sizes(sizes, 2.0**16, title="mine")
    assert "as they are: 50% become zero in fp16" in texts(figure)
    assert "times 65,536: 0% become zero in fp16" in texts(figure)
    assert evidence_of(figure) == "measured"


def test_the_opening_run_is_healthy() -> None:
    records = healthy_run(17)
    assert len(records) == 17 and records[-1].loss < 0.7 * records[0].loss
    assert not any(r.skipped or r.first for r in records)
    assert {r.scale for r in records} == {2.0**16}


def test_gradients_are_those_of_each_layers_output() -> None:
    model, inputs = network(nn.RMSNorm), torch.randn(4, FEATURES)
    labels = torch.tensor([0, 1, 2, 3])
    found = passed_back(model, lambda logits: F.cross_entropy(logits, labels), inputs)
    logits = model(inputs).detach().requires_grad_()
    F.cross_entropy(logits, labels).backward()
    assert logits.grad is not None
    torch.testing.assert_close(found[: 4 * CLASSES], logits.grad.flatten())
    assert len(found) == 4 * (CLASSES + 4 * 64), "four more layers of 64"
    assert not any(module._forward_hooks for module in model.modules())


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


def test_the_flipped_bit_is_framed() -> None:
    frames = [
        p
        for p in draw_bits("bf16", 0.1, "first exponent bit")[0].axes[0].patches
        if not p.get_fill()
    ]
    assert [p.get_x() for p in frames] == [1]


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
