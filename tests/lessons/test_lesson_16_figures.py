"""Figures of runs that fail: what they refuse, and what they say."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from utils.lessons.lesson_16.attempts import change_a_byte
from utils.lessons.lesson_16.checkpoint_files import draw_files, draw_left
from utils.lessons.lesson_16.failures import draw_days, draw_forgotten, draw_goodput, one_run
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


def test_files_are_drawn_from_what_the_checkpoint_says(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(8, 2)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        dcp.save(state, checkpoint_id=tmp_path / "one")
    figure = draw_files(tmp_path / "one", "weight", 2, title="T")
    told = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "rank 0 of 1 writes\nrows 0 to 7" in told and "__0_0.distcp" in told, told
    assert "rank 1 of 2 needs\nrows 4 to 7" in told, told
    with pytest.raises(ValueError, match="a tensor of the checkpoint; got bias"):
        draw_files(tmp_path / "one", "bias", 2, title="T")


def test_what_kills_left_marks_what_a_load_finds() -> None:
    left = {"written": (["writing", "step-00000010-save-3"], "step-00000010-save-3")}
    texts = [text.get_text() for text in draw_left(left, title="T").axes[0].texts]
    assert "step 10: loaded" in texts, texts
    assert "writing: no name" in texts, texts
    with pytest.raises(ValueError, match="at least one kill"):
        draw_left({}, title="T")


def test_a_changed_byte_makes_one_number_256_times_as_large(tmp_path: Path) -> None:
    state = {"model": {"head.weight": torch.linspace(-0.02, 0.02, 64).reshape(8, 8)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        dcp.save(state, checkpoint_id=tmp_path / "one")
        before, after = change_a_byte(tmp_path / "one")
        found = {"model": {"head.weight": torch.zeros(8, 8)}}
        dcp.load(found, checkpoint_id=tmp_path / "one")
    changed = found["model"]["head.weight"] != state["model"]["head.weight"]
    assert changed.sum() == 1 and after == 256 * before, (before, after)
    assert found["model"]["head.weight"][changed].item() == after, "what a load gives"


def test_one_run_does_its_work_and_loses_what_was_not_saved() -> None:
    spans = one_run(1, 3600.0, 60.0, 900.0, 8 * 3600.0, seed=0)
    kinds = [span.kind for span in spans]
    work = sum(span.end_seconds - span.start_seconds for span in spans if span.kind == "work")
    assert abs(work - 86_400) < 1e-6, f"{work} s of work"
    assert kinds.count("saving") == 24 and kinds.count("lost") == kinds.count("restarting") > 0
    assert all(
        span.end_seconds - span.start_seconds < 3660 for span in spans if span.kind == "lost"
    )
    ends = [span.end_seconds for span in spans[:-1]]
    assert ends == [span.start_seconds for span in spans[1:]], "one span begins where one ends"
    quiet = one_run(1, 3600.0, 60.0, 900.0, 1e12, seed=0)
    assert quiet[-1].end_seconds == 24 * 3660, "nothing fails"
