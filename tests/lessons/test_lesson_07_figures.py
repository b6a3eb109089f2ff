"""Lesson 07's pictures and the seconds that they show: who holds what, what waits for what."""

from __future__ import annotations

import itertools

import pytest
from matplotlib.figure import Figure

from utils import Span
from utils.lessons.lesson_07.flow import draw_flow
from utils.lessons.lesson_07.forms import prepared
from utils.lessons.lesson_07.script_text import run_text
from utils.lessons.lesson_07.sides import draw_sides
from utils.lessons.lesson_07.step_lanes import StepParts, step_lanes
from utils.units import Category, Evidence

WAITS = StepParts(
    forward=2.0,
    backward=6.0,
    up=1.0,
    down=2.0,
    last_down=4.0,
    step=5.0,
    weights=3.0,
    micro_batches=3,
)


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def lasts(spans: list[Span], kind: str) -> float:
    return sum(span.end_seconds - span.start_seconds for span in spans if span.kind == kind)


def test_all_waits_for_all_but_weights() -> None:
    lanes, seconds = step_lanes(WAITS)
    assert seconds == 3 * (2 + 6) + 3 * 2 + 2 * 1 + 4 + 5
    assert lasts(lanes["link"], "gradients or sums") == 3 * 2 + 2 * 1 + 4, "no sum comes up first"
    assert lasts(lanes["link"], "weights") == 3
    busy = sorted((s.start_seconds, s.end_seconds) for lane in ("GPU", "link") for s in lanes[lane])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(busy)), "a copy runs beside the GPU"


def test_hidden_copies_cost_what_is_longer_than_backward() -> None:
    lanes, seconds = step_lanes(WAITS._replace(hidden=True))
    assert seconds == 3 * (2 + 6) + (1 + 2 + 4 - 6) + 5, "the last micro-batch's copies take 7 of 6"
    assert lasts(lanes["link"], "gradients or sums") == 3 * 2 + 2 * 1 + 4


def test_weights_that_take_longer_than_the_step_are_waited_for() -> None:
    lanes, seconds = step_lanes(WAITS._replace(weights=8))
    assert seconds == step_lanes(WAITS)[1] - 5 + 5 / 4 + 8 - 8 / 4
    assert lanes["link"][-1].end_seconds == seconds + 8 / 4


def test_the_flow_says_what_crosses() -> None:
    told = texts(draw_flow(1e9, model="A model"))
    assert "in backward:\ngradients, 2.0 GB" in told and "weights, 2.0 GB" in told
    assert "gradients, fp32\n4.0 GB" in told and "12.0 GB" in told


def test_a_host_that_holds_nothing_has_no_panel() -> None:
    held = {Category.PARAMETERS: 3e9}
    how = {"title": "A title", "evidence": Evidence.PREDICTED}
    assert len(draw_sides({"one": (held, {}), "two": (held, {})}, **how).axes) == 1
    assert len(draw_sides({"one": (held, {}), "two": (held, held)}, **how).axes) == 2


def test_a_bar_of_one_part_has_its_number_once() -> None:
    parts = {Category.PARAMETERS: 3e9, Category.GRADIENTS: 2e9}
    figure = draw_sides(
        {"one": ({Category.PARAMETERS: 3e9}, {}), "two": (parts, {})},
        title="A title",
        evidence=Evidence.PREDICTED,
    )
    assert sorted(texts(figure).split()) == ["2.0", "3.0", "3.0", "5.0"]


def test_panels_can_have_other_names() -> None:
    held, how = {Category.PARAMETERS: 3e9}, {"title": "A title", "evidence": Evidence.PREDICTED}
    axes = draw_sides({"one": (held, held)}, places=("here", "there"), **how).axes
    assert [each.get_xlabel() for each in axes] == ["here (GB)", "there (GB)"]


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(ValueError, match="form='gradients'; write one of 'plain'"):
        prepared("gradients", lambda *_: None, lambda *_: None)


def test_the_script_takes_its_length_and_its_peak() -> None:
    told = run_text(512, 19.06)
    assert "splitlines(), 512)" in told and "simulated for Llama-2-7B: 19.1 GB" in told
