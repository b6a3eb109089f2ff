"""Lesson 01's ledger, whose count is right by what its hook returns alone, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from utils import measure
from utils.lessons.lesson_01.by_batch import draw_batches
from utils.lessons.lesson_01.by_phase import FORMULA, draw_by_phase, highest_bytes
from utils.lessons.lesson_01.counters import Counters, draw_counters, error_sizes
from utils.lessons.lesson_01.from_before import draw_from_before, dropped_bytes
from utils.lessons.lesson_01.holders import alive_tensors, draw_holders

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


ERROR = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 1.66 GiB is free. "
    "Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the allocated memory 12.09 GiB is "
    "allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated. If reserved"
)


def test_an_error_is_read_in_any_unit_and_spelling() -> None:
    sizes = error_sizes(ERROR)
    assert sizes == pytest.approx((3.0, 23.65, 1.66, 20.81, 12.09, 4.84))
    assert sizes.outside == pytest.approx(3.88)
    other = ERROR.replace("capacty", "capacity").replace("3.00 GiB", "338.00 MiB")
    other = other.replace("1.66 GiB", "0 bytes").replace("4.84 GiB", "512.00 KiB")
    found = error_sizes(other)
    assert (found.asked, found.free, found.pieces) == (338 / 1024, 0, 2**-11)
    with pytest.raises(ValueError, match=r"no 'this process has \.\.\. memory in use': paste"):
        error_sizes(ERROR.replace("this process", "Process 21197"))


def test_the_counters_of_a_card_add_up_to_it() -> None:
    error = Counters.of_error(error_sizes(ERROR))
    assert error.parts() == pytest.approx((12.09, 4.84, 3.88, 0, 1.18, 1.66))
    row = {"allocated_peak_bytes": 2**30, "reserved_peak_bytes": 3 * 2**29}
    without_card = Counters.of_row(row | {"used_on_the_device_bytes": 2**31})
    assert without_card.parts() == (1, 0.5, 0, 0.5, 0, 0), "nobody told the process apart"
    axes = draw_counters({"an error": error, "a row": without_card}, title="Cards").axes[0]
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == [
        *("12.09", "4.84", "3.88", "1.18", "1.66", "card 23.65"),
        *("1.00", "used 2.00"),
    ]


def test_each_line_of_the_phases_has_its_name_and_none_touch(deep: nn.Module) -> None:
    optimizer, inputs = torch.optim.Adam(deep.parameters()), torch.randn(256, 32)

    def step() -> None:
        optimizer.zero_grad()
        deep(inputs).sum().backward()
        optimizer.step()

    found = measure(step, model=deep, optimizer=optimizer, items=256, timed_steps=0)
    flat = {"by foreach": {256: found.peak_bytes}}  # the height of another line
    predicted = {
        128.5: found.peak_bytes,
        256: found.peak_bytes,
    }  # it bends where nothing is measured
    axes = draw_by_phase([found], predicted, flat, title="Phases").axes[0]
    assert [*axes.lines[0].get_xdata()] == [*predicted]
    names = [text.get_text().split("  ")[1] for text in axes.texts]
    phases = {"backward", "optimizer step", "forward"}
    assert {*names} == {FORMULA, "by foreach"} | phases
    heights = [text.get_position()[1] for text in axes.texts]
    bottom, top = axes.get_ylim()
    room = 0.06 * (top - bottom)
    assert all(b - a > room for a, b in pairwise(heights))


def test_the_drop_of_the_old_gradients_is_named(deep: nn.Module) -> None:
    optimizer, inputs = torch.optim.Adam(deep.parameters(), foreach=False), torch.randn(256, 32)
    gradients = 4 * sum(p.numel() for p in deep.parameters())

    def step(to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        deep(inputs).sum().backward()
        optimizer.step()

    found = measure(step, model=deep, optimizer=optimizer, timed_steps=0)
    assert dropped_bytes(found) == gradients
    axes = draw_from_before(found).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert any(text.startswith("zero_grad frees\n") for text in texts)
    assert axes.get_xlim()[0] < 0, "the time before the step is seen"
    kept = measure(lambda: step(False), model=deep, optimizer=optimizer, timed_steps=0)
    assert dropped_bytes(kept) == 0


def test_each_batch_of_a_loop_has_its_name(deep: nn.Module) -> None:
    inputs = torch.randn(16, 32)

    def loop(train: bool) -> None:
        for _ in range(3):
            loss = deep(inputs).sum()
            if train:
                loss.backward()

    kinds = {"validation": False, "training": True}
    runs = {
        name: measure(lambda train=train: loop(train), model=deep, warmup_steps=0, timed_steps=0)
        for name, train in kinds.items()
    }
    panels = draw_batches(runs, "activations", title="Loops").axes
    batches = [f"batch {number}" for number in (1, 2, 3)]
    for axes, train in zip(panels, kinds.values(), strict=True):
        texts = [text.get_text() for text in axes.texts]
        assert texts[:3] == batches
        assert texts[3:] == ["forward", "backward"] * 3 * train


def test_the_holders_of_equal_tensors_are_told_by_age() -> None:
    head, hidden = nn.Linear(8, 4000, bias=False), torch.randn(64, 8)
    one = 4 * 64 * 4000
    answers = torch.randint(0, 4000, (64,))

    def step(keeps_name: bool) -> None:
        head.zero_grad()
        logits = head(hidden)
        loss = nn.functional.cross_entropy(logits, answers)
        if not keeps_name:
            del logits
        loss.backward()

    runs = [
        measure(lambda keeps=keeps: step(keeps), model=head, name=name, timed_steps=0)
        for name, keeps in {"with the name": True, "with del": False}.items()
    ]
    assert [len(alive_tensors(run, one)) for run in runs] == [4, 3]
    names = ["logits", "log-probabilities", "gradient of 2", "gradient of 1"]
    axes = draw_holders(runs, one, names, title="Holders").axes[0]
    numbers = [text.get_text() for text in axes.texts if len(text.get_text()) == 1]
    assert numbers == ["1", "2", "3", "4", "2", "3", "4"]
    with pytest.raises(ValueError, match="has 4 tensors of this size, and 2 names"):
        draw_holders(runs, one, names[:2], title="Holders")
