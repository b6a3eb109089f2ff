"""Lesson 02's pictures: which moment decides, what a card holds, and what fp16 loses of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from view_cases import evidence_of, measured, texts

from utils.lessons.lesson_02.figures import (
    as_simulated,
    batch_at,
    draw_moments,
    draw_on_the_card,
    turn,
)
from utils.lessons.lesson_02.gradients import at_convolutions
from utils.lessons.lesson_02.record_table import record_table
from utils.memory import Measurement
from utils.memory.events import Mark, Phase
from utils.units import GIB, Evidence
from utils.views import draw_breakdown


def simulated(batch: int, *, in_step: bool = False) -> Measurement:
    """A simulated step whose peak lies in backward, or in the optimizer step."""
    last = Mark(3200 if in_step else 6000, Phase.OPTIMIZER_STEP)
    marks = [Mark(0, Phase.FORWARD), Mark(3000, Phase.BACKWARD), last]
    return measured(batch, evidence=Evidence.SIMULATED, marks=marks)


def test_the_ground_changes_where_a_moment_begins_to_decide() -> None:
    steep = [simulated(1, in_step=True), simulated(16), simulated(32)]
    figure = draw_moments({"fp32": steep, "mixed": steep}, title="A title")
    (axes,) = figure.axes
    left, middle, right = (patch.get_x() for patch in axes.patches)
    assert left == axes.get_xlim()[0] and middle == right == pytest.approx(4)
    told = texts(figure)
    assert "fp32, peak in the optimizer step" in told and "mixed, peak in backward" in told
    assert "1.00 of fp32" in told and evidence_of(figure).startswith("simulated, for a ")
    filled = [
        line.get_markerfacecolor() == "white" for line in axes.lines if line.get_marker() != "None"
    ]
    assert filled == [False, True] * 2, "filled in the optimizer step, hollow in backward"
    assert [list(line.get_xdata()) for line in axes.lines][1:3] == [[1], [16, 32]]


def test_a_moment_turns_between_two_batches_and_a_line_keeps_to_its_peaks() -> None:
    runs = [simulated(1, in_step=True), simulated(4, in_step=True), simulated(9), simulated(32)]
    assert turn(runs) == pytest.approx(6)
    (axes,) = draw_moments({"fp32": runs, "mixed": runs}, title="A title").axes
    batches, heights = axes.lines[0].get_data()
    assert list(batches) == [1, 4, 9, 32]
    assert list(heights) == [run.peak_bytes / GIB for run in runs]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4", "32"]


def test_a_line_is_followed_to_any_height() -> None:
    runs = [simulated(4), simulated(8)]
    half = (runs[0].peak_bytes + runs[1].peak_bytes) / 2
    assert batch_at(runs, half) == pytest.approx(6)
    assert batch_at(runs, 2 * runs[1].peak_bytes - runs[0].peak_bytes) == pytest.approx(12)


def test_levels_and_what_leaves_the_picture_are_told() -> None:
    lines = {"fp32": [simulated(4), simulated(64)], "mixed": [simulated(4), simulated(8)]}
    figure = draw_on_the_card(
        lines,
        limits={"a card": GIB, "another": 1.2 * GIB},
        notes={"a note": (8, 0.5, -9, 0)},
        highest_gib=1.5,
        title="A title",
    )
    (axes,) = figure.axes
    assert axes.get_ylim() == (0, 1.5)
    told = texts(figure)
    assert "a note" in told.splitlines()
    assert "fp32, 64: 2.3 GiB, above the picture" in told and "mixed, 8" not in told
    assert {"a card", "another"} <= set(told.splitlines())
    styles = [
        line.get_linestyle() for line in axes.lines if line.get_label() in ("a card", "another")
    ]
    assert len(set(styles)) == 2, "two levels differ in more than their height"


def test_the_corner_does_not_say_that_a_card_was_used() -> None:
    figure = as_simulated(draw_breakdown([simulated(4)]), "a simulated T4")
    assert evidence_of(figure) == "simulated, for a T4 that is not here"
    assert len([text for text in figure.texts if "simulated" in text.get_text()]) <= 1


def test_a_record_stands_beside_its_simulation() -> None:
    sizes = {"allocated_peak_bytes": 3 * GIB, "reserved_peak_bytes": 4 * GIB}
    row = {"precision": "fp32", "batch": 8, "images_per_second": 99.6} | sizes
    capped = row | {"cap": "16GB"}
    table = record_table([row, capped], [2 * GIB, 2 * GIB], 16e9)
    assert list(table["held to"]) == ["no limit", "14.90 GiB"]
    assert list(table["simulated"]) == [2, 2] and list(table["allocated"]) == [3, 3]
    assert list(table["reserved"]) == [4, 4] and list(table["images/s"]) == [100, 100]
    assert list(table["reserved - simulated"]) == [2, 2]


def test_gradients_count_as_in_their_batch_and_hooks_are_gone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10))
    two, eight = (at_convolutions(model, images=2, batch=batch) for batch in (2, 8))
    assert len(two) == 2 * 4 * 8 * 8 and torch.equal(two, 4 * eight)
    assert not model[0]._forward_hooks
