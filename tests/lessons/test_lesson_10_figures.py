"""The clinic's figures: what they draw, and what they refuse."""

from __future__ import annotations

import pytest

from utils.clinic import Examination, examine
from utils.lessons.lesson_10.over_time import draw_alive, draw_stacked, draw_steps
from utils.lessons.lesson_10.segments import Segment
from utils.lessons.lesson_10.seven import seven
from utils.lessons.lesson_10.steps import by_step
from utils.lessons.lesson_10.views import (
    FullCard,
    PatientBytes,
    Pieces,
    draw_four_ways,
    draw_peak,
    draw_segments,
    draw_ward,
)
from utils.units import GIB, MIB, Evidence


@pytest.fixture(scope="module")
def found() -> Examination:
    return examine(seven()["kept_graph"])


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
    names = {"activations": "what a layer gave"}
    figure = draw_segments(rows, title="Map", asked={"before": 20 * MIB}, names=names)
    before, after = figure.axes
    assert before.get_title(loc="left") == "before\n20.00 MiB reserved"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["what a layer gave", "reserved, free"]
    lengths = [bar.get_width() for bar in before.patches]
    assert lengths == [2, 18, 20, 20], "two blocks, the segment's frame, what was asked for"
    assert [text.get_text() for text in before.texts] == ["asked for: 20.00 MiB"]
    assert not after.patches and "simulated" in figure._supxlabel.get_text()


def test_a_small_segment_says_what_is_in_it() -> None:
    rows = {"now": [Segment(((MIB // 2, "parameters"), (3 * MIB // 2, "")))]}
    axes = draw_segments(rows, title="Map").axes[0]
    assert [text.get_text() for text in axes.texts] == ["small tensors; 512.00 KiB taken"]


def test_a_peak_is_one_bar_in_parts_against_its_budget() -> None:
    axes = draw_peak({"logits": 3 * MIB, "all else": MIB}, 2 * MIB, title="Peak").axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 3), (3, 1)]
    told = [text.get_text() for text in axes.texts]
    assert told == ["logits\n3.0 MiB", "all else\n1.0 MiB", " budget 2.00 MiB"]


def test_a_run_has_a_number_for_each_step_and_its_budget(found: Examination) -> None:
    axes = draw_alive({"run": found}, title="Run", after_last="the end").axes[0]
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [*map(str, range(1, 9)), "the end"], "its steps, and what follows"
    highest, budget = [text.get_text() for text in axes.texts]
    assert highest == f"{found.run.peak_bytes / MIB:.1f} MiB" and budget == " budget 40.00 MiB"
    peaks = [line for line in axes.lines if line.get_marker() == "v"]
    assert len(peaks[0].get_xdata()) == 9, "each step's, and that of the end"
    left, right = axes.get_xticks()[-2:], axes.get_xlim()[1]
    assert right - left[1] >= 0.19 * right, (
        "what comes after the last step is wide enough to be seen"
    )


def test_a_run_by_category_is_stacked_up_to_its_peak_in_the_steps_shown(found: Examination) -> None:
    axes = draw_stacked(found, title="Stack", steps=2).axes[0]
    top = max(path.vertices[:, 1].max() for one in axes.collections for path in one.get_paths())
    assert top == pytest.approx(by_step(found)[1].peak_bytes / MIB)
    told = [text.get_text() for text in axes.texts]
    assert told[-2:] == [f"{top:.1f} MiB", " budget 40.00 MiB"], "the peak and the budget"
    assert "backward" in told, "a phase that is wide has its name"


def test_four_ways_have_a_panel_each(found: Examination) -> None:
    parts = {"tensors": GIB, "other processes": GIB // 2, "free": GIB // 4}
    card = FullCard(parts, "a log", ["other processes"])
    segments = [Segment(((2 * MIB, "activations"), (18 * MIB, "")))]
    pieces = Pieces(segments, 20 * MIB, 34 * MIB, {"activations": "what a layer gave"})
    panels = draw_four_ways(pieces, card, found, found).axes
    note = panels[0].texts[-1].get_text()
    assert "20 MiB reserved of 34" in note and "14 MiB outside" in note
    legend = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert legend == ["what a layer gave", "reserved, free"]
    assert [axes.get_title(loc="left")[:2] for axes in panels] == ["a.", "b.", "c.", "d."]
    assert [text.get_text().strip() for text in panels[1].texts] == ["1.00", "0.50", "0.25"]


def test_each_step_has_its_peak_below_what_is_reserved_for_it(found: Examination) -> None:
    steps = by_step(found)
    assert len(steps) == 8 and max(step.peak_bytes for step in steps) == found.run.peak_bytes
    assert [step.reserved_bytes for step in steps] == sorted(s.reserved_bytes for s in steps)
    names = [str(number) for number in range(8)]
    axes = draw_steps({"run": steps}, {"run": names}, limit_bytes=40 * MIB, title="Steps").axes[0]
    assert [bar.get_height() * MIB for bar in axes.patches] == [step.peak_bytes for step in steps]
    line = next(line for line in axes.lines if line.get_drawstyle() == "steps-post")
    begins, levels = list(line.get_xdata()), list(line.get_ydata())
    for bar, begin, end, level in zip(axes.patches, begins, begins[1:], levels, strict=False):
        assert begin < bar.get_x() and bar.get_x() + bar.get_width() < end, "over its whole bar"
        assert bar.get_height() <= level, "what is alive is reserved"


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="the ward is empty"):
        draw_ward({}, title="")
    with pytest.raises(ValueError, match="nothing is reserved"):
        draw_segments({"before": []}, title="")
    with pytest.raises(ValueError, match="a block or more"):
        draw_peak({}, 0, title="")
    with pytest.raises(ValueError, match="a run or more"):
        draw_alive({}, title="")
    with pytest.raises(ValueError, match="a run or more"):
        draw_steps({}, {}, limit_bytes=0, title="")
