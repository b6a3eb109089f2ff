"""What `measure` does with input that it cannot use, and with steps that fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meter_cases import MeteredProgram, classify, mlp
from torch import nn

from utils.memory import Category, OverBudgetError, budget, measure, phase
from utils.memory.events import AllocationEvent
from utils.memory.source import CountingSource, ProfilerSource
from utils.units import parse_bytes

SOURCES = [CountingSource, ProfilerSource]


@pytest.fixture
def case() -> MeteredProgram:
    model = mlp()
    return classify(model, torch.optim.Adam(model.parameters()), torch.ones(16, 20))


def hooks(*owners: Any) -> list[tuple[str, Any]]:
    """Everything that is called a hook, on models with all that is inside them, and others."""
    found = []
    for owner in owners:
        inside = owner.modules() if isinstance(owner, nn.Module) else [owner]
        inside = [*inside, *(owner.parameters() if isinstance(owner, nn.Module) else ())]
        for part in inside:
            names = [name for name in dir(part) if "hooks" in name and "register" not in name]
            rows = [(name, getattr(part, name)) for name in names]
            found += [(name, len(row)) for name, row in rows if hasattr(row, "__len__") and row]
    return found


def compiled_in_place() -> nn.Module:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    return model


def on_two_devices() -> nn.Module:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


# The argument, how to make an unusable one, and words of the sentence that must come.
BAD: list[tuple[str, Callable[[], Any], str]] = [
    ("model", lambda: None, "needs model="),
    ("model", lambda: len, "needs model="),
    ("model", nn.ReLU, "no parameters"),
    ("model", lambda: nn.Linear(2, 2, device="meta"), "'meta'"),
    ("model", on_two_devices, "on one device"),
    ("model", compiled_in_place, "torch.compile"),
    ("optimizer", lambda: torch.optim.Adam, "torch.optim optimizer"),
    ("items", lambda: 0, "at least 1"),
    ("items", lambda: -3, "at least 1"),
    ("timed_steps", lambda: -1, "cannot be negative"),
    ("warmup_steps", lambda: -1, "cannot be negative"),
    ("step", lambda: None, "function without arguments"),
]


@pytest.mark.parametrize(("argument", "make", "words"), BAD)
def test_bad_arguments_end_in_a_sentence(
    case: MeteredProgram, argument: str, make: Callable[[], Any], words: str
) -> None:
    arguments = {"step": case.step, "model": case.model, "optimizer": case.optimizer}
    arguments[argument] = make()
    with pytest.raises(ValueError, match=words):
        measure(arguments.pop("step"), **arguments)
    assert hooks(case.model, case.optimizer) == []


def test_an_mps_model_is_refused_by_name() -> None:
    from utils.memory.source import source_for

    with pytest.raises(ValueError, match="'mps'.*Move model and data to 'cpu'"):
        source_for(torch.device("mps"))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("fails", ["before forward", "in forward", "in backward", "at the end"])
def test_a_step_that_raises(case: MeteredProgram, source: Callable[[], Any], fails: str) -> None:
    """The learner's own error comes through, hooks are gone, the next measurement works."""
    calls = 0

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    def step() -> None:
        nonlocal calls
        calls += 1
        if fails == "before forward" and calls == 2:  # the second step is the metered one
            fail()
        case.model.zero_grad()
        output = case.model(case.inputs[0])
        if fails == "in backward" and calls == 2:
            output.register_hook(fail)
        output.sum().backward()
        case.optimizer.step()
        if fails == "at the end" and calls == 2:
            fail()

    expected = measure(
        case.step, model=case.model, optimizer=case.optimizer, timed_steps=0, source=source()
    )
    before = hooks(case.model, case.optimizer)
    inner = case.model[2].register_forward_hook(fail) if fails == "in forward" else None
    with pytest.raises(KeyError, match="mine") as raised:
        measure(step, model=case.model, optimizer=case.optimizer, source=source())
    assert raised.value.__cause__ is None
    if inner is not None:
        inner.remove()
    assert hooks(case.model, case.optimizer) == before == []
    again = measure(
        case.step, model=case.model, optimizer=case.optimizer, timed_steps=0, source=source()
    )
    assert again.peak_bytes == expected.peak_bytes


def test_the_recording_stops_when_a_step_raises(case: MeteredProgram) -> None:
    class Watched(CountingSource):
        stopped = 0

        def stop(self) -> list[AllocationEvent]:
            self.stopped += 1
            return super().stop()

    source = Watched()
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, model=case.model, source=source)
    assert source.stopped == 1


def test_the_learners_own_hooks_stay(case: MeteredProgram) -> None:
    seen: list[str] = []
    case.model.register_forward_hook(lambda *_: seen.append("forward"))
    case.model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    case.optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    before = hooks(case.model, case.optimizer)
    measure(case.step, model=case.model, optimizer=case.optimizer, timed_steps=1)
    assert hooks(case.model, case.optimizer) == before != []
    assert seen == ["forward", "gradient", "step"] * 3


def test_a_scripted_part_leaves_no_hooks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and still in use
        scripted = torch.jit.script(nn.Linear(8, 8))
    model, x = nn.Sequential(nn.Linear(8, 8), scripted), torch.ones(4, 8)
    found = measure(lambda: model(x).sum().backward(), model=model, timed_steps=0)
    assert found.breakdown[Category.PARAMETERS] == 2 * 4 * 72
    assert hooks(model[0]) == []


def test_an_optimizer_without_backward_is_an_error(case: MeteredProgram) -> None:
    with pytest.raises(ValueError, match="never called backward"):
        measure(lambda: case.model(case.inputs[0]), model=case.model, optimizer=case.optimizer)
    assert hooks(case.model, case.optimizer) == []


def test_training_without_an_optimizer_is_noted(case: MeteredProgram) -> None:
    step = lambda: case.model(case.inputs[0]).sum().backward()  # noqa: E731
    trained = measure(step, model=case.model, timed_steps=0)
    assert any("No optimizer was given" in note for note in trained.notes)
    told = measure(case.step, model=case.model, optimizer=case.optimizer, timed_steps=0)
    assert not any("No optimizer" in note for note in told.notes)
    assert any("ran 2 times" in note for note in told.notes)


def test_throughput_counts_items_over_the_median(case: MeteredProgram) -> None:
    found = measure(case.step, model=case.model, optimizer=case.optimizer, items=16, unit="rows")
    assert len(found.step_seconds) == 5
    low, high = found.spread_seconds
    assert low <= found.median_step_seconds <= high
    assert found.items_per_second == 16 / sorted(found.step_seconds)[2]
    assert "rows/s" in str(found)


def test_over_budget_names_phase_module_and_category() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5000))
    step = lambda: model(torch.ones(8, 10)).sum().backward()  # noqa: E731
    with pytest.raises(OverBudgetError) as raised:
        measure(step, model=model, within=budget("500KiB"))
    crossing = raised.value.crossing
    assert isinstance(raised.value, torch.OutOfMemoryError)
    assert (crossing.phase, crossing.module) == ("forward", "1")
    assert crossing.category is Category.LOGITS_AND_LOSS
    assert crossing.wanted_bytes == 8 * 5000 * 4
    assert crossing.alive_bytes > crossing.limit_bytes == 500 * 1024
    for words in ("during forward", "module '1'", "logits and loss", "500.00 KiB"):
        assert words in str(raised.value)
    assert hooks(model) == []


def test_a_budget_of_exactly_the_peak_fits(case: MeteredProgram) -> None:
    how = {"model": case.model, "optimizer": case.optimizer, "timed_steps": 0}
    peak = measure(case.step, **how).peak_bytes
    assert measure(case.step, **how, within=budget(peak)).peak_bytes == peak
    with pytest.raises(OverBudgetError):
        measure(case.step, **how, within=budget(peak - 1))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("GET was unable to find an engine to execute this computation", OverBudgetError),
        ("CUDA out of memory. Tried to allocate 2.50 GiB.", OverBudgetError),
        ("shapes differ", RuntimeError),
    ],
)
def test_a_capped_card_says_over_budget_in_any_librarys_words(
    words: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps: list[float] = []
    card = SimpleNamespace(total_memory=15_828_320_256)  # a T4: less than 16 GB
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.75)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: caps.append(share)
    )
    with pytest.raises(RuntimeError) as raised, budget("16GB").enforced(torch.device("cuda")):
        raise RuntimeError(words)
    assert type(raised.value) is expected and words in str(raised.value)
    assert caps == [1.0, 0.75], "set back"


@pytest.mark.parametrize("text", ["", "lots", "24XB", "-3GB", "0", "1e9GB", "GB", "12 34"])
def test_a_budget_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        budget(text)


def test_sizes_tell_decimal_from_binary_units() -> None:
    assert (parse_bytes("24GB"), parse_bytes("1.5 gib"), parse_bytes(7)) == (
        24 * 10**9,
        3 * 2**29,
        7,
    )


def test_phases_named_by_hand(case: MeteredProgram) -> None:
    def step() -> None:
        case.model.zero_grad()
        case.model(case.inputs[0]).sum().backward()
        with phase("clip"):
            with phase("norm"):
                nn.utils.get_total_norm([p.grad for p in case.model.parameters()])
            nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        case.optimizer.step()

    found = measure(step, model=case.model, optimizer=case.optimizer, timed_steps=0)
    names = [span.name for span in found.timeline.spans]
    assert names == [
        "before forward",
        "forward",
        "loss",
        "backward",
        "clip",
        "norm",
        "clip",
        "backward",
        "optimizer step",
        "after step",
    ]


def test_a_phase_outside_of_measure_is_a_profiler_range_and_no_more() -> None:
    with torch.profiler.profile() as profiler, phase("clip"):
        torch.ones(3)
    assert "clip" in [event.key for event in profiler.key_averages()]
    with pytest.raises(KeyError), phase("fails"):
        raise KeyError


def test_a_budget_may_be_its_size(case: MeteredProgram) -> None:
    how = {"model": case.model, "optimizer": case.optimizer, "timed_steps": 0}
    peak = measure(case.step, **how, within="1GB").peak_bytes
    assert measure(case.step, **how, within=peak).peak_bytes == peak
    with pytest.raises(OverBudgetError, match="over the budget of 1,000 B"):
        measure(case.step, **how, within="1KB")
    for size in ("lots", -1, "1e9GB"):
        with pytest.raises(ValueError, match="size"):
            measure(case.step, **how, within=size)
    assert hooks(case.model, case.optimizer) == []


def test_a_failed_measurement_lets_the_next_one_in(case: MeteredProgram) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            measure(lambda: 1 / 0, model=case.model)
