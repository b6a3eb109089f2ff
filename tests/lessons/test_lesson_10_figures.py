"""The clinic's figures: what they draw, and what they refuse."""

from __future__ import annotations

import pytest

from utils.lessons.lesson_10.views import (
    PatientBytes,
    Segment,
    draw_blocks,
    draw_segments,
    draw_ward,
)
from utils.units import MIB, Evidence


def test_the_ward_has_a_bar_and_a_note_for_each_patient() -> None:
    cases = {
        "one": PatientBytes(30 * MIB, 20 * MIB, 10 * MIB),
        "two": PatientBytes(50 * MIB, 20 * MIB),
    }
    axes = draw_ward(cases, title="Ward", evidence=[Evidence.MEASURED]).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1.5, 0.5, 2.5]
    notes = [text.get_text() for text in axes.texts]
    assert notes == ["30.00 MiB of 20.00 MiB", "10.00 MiB of 20.00 MiB", "50.00 MiB of 20.00 MiB"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]


def test_segments_are_as_long_as_their_blocks() -> None:
    rows = {"before": [Segment(((2 * MIB, "activations"), (18 * MIB, "")))], "after": []}
    figure = draw_segments(rows, title="Map", asked={"before": 20 * MIB})
    before, after = figure.axes
    lengths = [bar.get_width() for bar in before.patches]
    assert lengths == [2, 18, 20, 20], "two blocks, the segment's frame, what was asked for"
    assert [text.get_text() for text in before.texts] == ["asked for: 20.00 MiB"]
    assert not after.patches and "simulated" in figure._supxlabel.get_text()


def test_blocks_carry_their_bytes() -> None:
    axes = draw_blocks({"logits": 3 * MIB, "all else": MIB}, title="Peak").axes[0]
    assert [text.get_text() for text in axes.texts] == ["3.00 MiB", "1.00 MiB"]
    assert [bar.get_width() for bar in axes.patches] == [3, 1]


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="the ward is empty"):
        draw_ward({}, title="")
    with pytest.raises(ValueError, match="nothing is reserved"):
        draw_segments({"before": []}, title="")
    with pytest.raises(ValueError, match="a block or more"):
        draw_blocks({}, title="")
