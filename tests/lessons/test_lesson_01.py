"""Lesson 01's ledger, whose count is right by what its hook returns alone, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from utils import measure
from utils.lessons.lesson_01.by_phase import draw_by_phase, highest_bytes
from utils.lessons.lesson_01.counters import Counters, draw_counters

LESSON = Path(__file__).parents[2] / "sources/beginner/01_where_memory_goes/lesson.py"
LAYERS = 64  # freed memory is taken again by one of them at least
KEPT, OUTPUT = "return tensor.detach()", "output = model(inputs)"


def cell() -> str:
    """The source of the lesson's ledger."""
    cells = LESSON.read_text(encoding="utf-8").split("\n# %%")
    return next(c for c in cells if "\ndef saved_for_backward" in c).lstrip()


def ledger(source: str) -> Callable[[nn.Module, torch.Tensor], int]:
    """The ledger of a source."""
    names: dict[str, object] = {"torch": torch}
    exec(source, names)
    found = names["saved_for_backward"]
    assert callable(found)
    return found


@pytest.fixture
def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), *(nn.Tanh() for _ in range(LAYERS)))


def test_the_output_may_be_dropped(deep: nn.Module) -> None:
    """Counting ends before forward returns."""
    source = cell()
    assert source.count(OUTPUT) == 1
    head, _, tail = source.partition("    assert output")
    dropped = head.replace(OUTPUT, "model(inputs)") + tail.partition("\n")[2]
    inputs = torch.randn(256, 32)
    assert ledger(dropped)(deep, inputs) == ledger(source)(deep, inputs)
    assert ledger(source)(deep, inputs) == 4 * 256 * (32 + LAYERS * 64)


def test_what_the_hook_returns_holds_the_storage(deep: nn.Module) -> None:
    source, inputs = cell(), torch.randn(256, 32)
    assert source.count(KEPT) == 1
    forgetful = ledger(source.replace(KEPT, "return None"))
    assert forgetful(deep, inputs) < ledger(source)(deep, inputs)


def test_the_peak_is_the_highest_of_its_phase(deep: nn.Module) -> None:
    optimizer, inputs = torch.optim.Adam(deep.parameters()), torch.randn(256, 32)

    def step() -> None:
        optimizer.zero_grad()
        deep(inputs).sum().backward()
        optimizer.step()

    found = measure(step, model=deep, optimizer=optimizer, timed_steps=0)
    names = {span.name for span in found.timeline.spans}
    assert highest_bytes(found, found.peak_phase) == found.peak_bytes
    assert max(highest_bytes(found, name) for name in names) == found.peak_bytes
    with pytest.raises(ValueError, match="no phase 'sideways'; it has"):
        highest_bytes(found, "sideways")


def test_the_counters_of_a_card_add_up_to_it() -> None:
    error = Counters(allocated=12.09, reserved=16.93, process=20.81, used=21.99, card=23.65)
    assert error.parts() == pytest.approx((12.09, 4.84, 3.88, 0, 1.18, 1.66))
    row = {"allocated_peak_bytes": 2**30, "reserved_peak_bytes": 3 * 2**29}
    without_card = Counters.of_row(row | {"used_on_the_device_bytes": 2**31})
    assert without_card.parts() == (1, 0.5, 0, 0.5, 0, 0), "nobody told the process apart"
    axes = draw_counters({"an error": error, "a row": without_card}, title="Cards").axes[0]
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == ["12.09", "4.84", "3.88", "1.66", "23.65 GiB", "2.00 GiB"]


def test_each_line_of_the_phases_has_its_name_and_none_touch(deep: nn.Module) -> None:
    optimizer, inputs = torch.optim.Adam(deep.parameters()), torch.randn(256, 32)

    def step() -> None:
        optimizer.zero_grad()
        deep(inputs).sum().backward()
        optimizer.step()

    found = measure(step, model=deep, optimizer=optimizer, items=256, timed_steps=0)
    flat = {"by foreach": {256: found.peak_bytes}}  # the height of another line
    axes = draw_by_phase([found], {256: found.peak_bytes}, flat, title="Phases").axes[0]
    names = [text.get_text().split("  ")[1] for text in axes.texts]
    phases = {"backward", "optimizer step", "forward"}
    assert {*names} == {"the formula (predicted)", "by foreach"} | phases
    heights = [text.get_position()[1] for text in axes.texts]
    bottom, top = axes.get_ylim()
    room = 0.06 * (top - bottom)
    assert all(b - a > room for a, b in pairwise(heights))
