"""The experiments: tiny runs on the CPU, CUDA's paths on stand-ins, rows that ran out of memory."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evidence.record import __main__ as command
from evidence.record import device_speed, experiment, resnet50
from evidence.record.experiment import (
    Stage,
    Trial,
    free_memory,
    measured_row,
    run_trial,
    run_trials,
)
from evidence.record.store import recorded
from utils.memory import Measurement, MemoryTimeline, OverBudgetError, budget
from utils.memory.events import Allocation, Category, Mark, Phase
from utils.techniques.precision import AMP_BF16, AMP_FP16, FP32, TF32, offered, tf32
from utils.units import GIB, Evidence

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HASH = "0123456789abcdef0123456789abcdef01234567"
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 14.74 GiB of "
    "which 1.00 GiB is free.\nSee documentation for Memory Management"
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_card(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report a card of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    has_bf16 = capability >= (8, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)


# Tiny runs


def test_resnet50_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grid = resnet50.Grid("cifar", 32, (1,))
    monkeypatch.setattr(resnet50, "CPU_GRIDS", (grid,))
    monkeypatch.setattr(resnet50, "TIMED_STEPS", 1)
    assert command.main(["resnet50", "--commit", HASH], root=tmp_path) == 0
    (record,) = recorded("resnet50", tmp_path)
    assert [(row["precision"], row["batch"]) for row in record.rows] == [
        ("fp32", 1),
        ("amp bf16", 1),
    ]
    for row in record.rows:
        assert row["completed"] and not row["steps_skipped"]
        assert sum(row["breakdown"].values()) == row["peak_bytes"]
        assert row["images_per_second"] == pytest.approx(1 / row["median_step_seconds"])
        # ResNet-50 with ten classes and the CIFAR stem, and Adam's two moments with its steps.
        assert row["breakdown"]["parameters"] == 4 * 23_520_842
        assert row["breakdown"]["optimizer state"] == 8 * 23_520_842 + 4 * 161
        assert row["peak_phase"] in {"backward", "optimizer step"}


def test_device_speed_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_speed, "CPU_SHAPES", ((64, 32, 16),))
    monkeypatch.setattr(device_speed, "TRIAL_SECONDS", 0.001)
    assert command.main(["device_speed", "--commit", HASH], root=tmp_path) == 0
    (record,) = recorded("device_speed", tmp_path)
    assert [row["quantity"] for row in record.rows] == ["matmul", "matmul", "memory bandwidth"]
    for row in record.rows[:2]:
        rate = 2 * 64 * 32 * 16 / row["best_seconds"] / 1e12
        assert (row["unit"], row["best"]) == ("TFLOP/s", pytest.approx(rate))
    copy = record.rows[2]
    assert copy["moved_bytes"] == 2 * 64 * 2**20, "what is read and what is written"
    assert copy["best"] == pytest.approx(copy["moved_bytes"] / copy["best_seconds"] / 1e9)
    assert all(row["best"] >= row["median"] > 0 for row in record.rows)


# What a GPU would be asked


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), [FP32, AMP_FP16]),
        ((8, 0), [FP32, TF32, AMP_FP16, AMP_BF16]),
        ((9, 0), [FP32, TF32, AMP_FP16, AMP_BF16]),
    ],
)
def test_precisions_of_a_gpu(
    capability: tuple[int, int], expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_card(capability, monkeypatch)
    assert offered(CUDA) == expected
    asked = [dict(trial.settings) for trial in resnet50.trials(CUDA)]
    steps = {(r["image_size"], r["precision"], r["batch"]) for r in asked if "batch" in r}
    names = [precision.name for precision in expected]
    small = {(32, name, batch) for name in names for batch in (128, 512, 2048)}
    large = {(224, name, batch) for name in names for batch in (32, 128, 256)}
    assert steps == small | large
    searched = [(r["image_size"], r["precision"]) for r in asked if "cap" in r]
    assert searched == [(size, name) for size in (32, 224) for name in names]


def test_speeds_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card((9, 0), monkeypatch)
    asked = [dict(trial.settings) for trial in device_speed.trials(CUDA)]
    matmuls = [row for row in asked if row["quantity"] == "matmul"]
    assert {row["precision"] for row in matmuls} == {"fp32", "tf32", "fp16", "bf16"}
    assert len(matmuls) == 4 * 6
    rest = ["memory bandwidth", "host to device", "device to host"]
    assert [row["quantity"] for row in asked[len(matmuls) :]] == rest


def test_tf32_is_set_and_set_back() -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    for precision, expected in ((TF32, "tf32"), (FP32, "ieee"), (AMP_FP16, "ieee")):
        with pytest.raises(KeyError), tf32(precision.tf32):
            assert [switch.fp32_precision for switch in switches] == [expected] * 2
            raise KeyError
        assert [switch.fp32_precision for switch in switches] == before


def test_gpu_seconds_come_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(calls)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return 5.0 * (end.at - self.at)  # 5 ms a call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    seconds = device_speed.time_action(lambda: calls.append(1), CUDA)
    assert seconds == [pytest.approx(0.005)] * device_speed.TRIALS
    assert len(calls) == 2 + 1 + 4 * device_speed.TRIALS, "four calls fill 20 ms"


@pytest.mark.parametrize("way", ["host to device", "device to host"])
def test_host_link(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    filled: list[bool] = []

    def timed(action: Any, device: torch.device) -> list[float]:
        filled.append(action() is pinned[0])
        return [2e-6, 4e-6, 5e-6]

    monkeypatch.setattr(device_speed, "GIB", 1000)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(device_speed, "time_action", timed)
    row = device_speed._host_link(way, CPU, Stage())
    assert (row["moved_bytes"], row["trials"], row["unit"]) == (1000, 3, "GB/s")
    assert (row["best"], row["median"]) == (pytest.approx(0.5), pytest.approx(0.25))
    assert filled == [way == "device to host"], "which of the two is written to"


def test_memory_is_given_back_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: done.append("workspaces"), raising=False)
    free_memory(CUDA)
    assert done == ["synchronize", "workspaces", "empty"]


# Out of memory


def failing(error: Exception, stage_name: str = "backward") -> Trial:
    def run(stage: Stage) -> dict:
        stage.name = stage_name
        raise error

    return Trial({"batch": 4096}, run)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError(CUDA_MESSAGE), int(2.5 * GIB)),
        (OverBudgetError(f"The step does not fit in 14.90 GiB: {CUDA_MESSAGE}"), int(2.5 * GIB)),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), None),
        (RuntimeError("GET was unable to find an engine to execute this computation"), None),
        (RuntimeError("CUDA error: out of memory"), None),
    ],
)
def test_out_of_memory_is_a_row(error: RuntimeError, wanted: int | None) -> None:
    row = run_trial(failing(error))
    assert (row["batch"], row["completed"], row["failed_in"]) == (4096, False, "backward")
    assert row["wanted_bytes"] == wanted
    assert str(error).startswith(row["error"]) and "\n" not in row["error"]


def test_the_cpu_out_of_memory_is_a_row() -> None:
    row = run_trial(Trial({}, lambda _: {"tensor": torch.empty(2**50, dtype=torch.uint8)}))
    assert (row["completed"], row["wanted_bytes"]) == (False, 2**50)


def test_over_a_budget_the_row_names_the_phase_that_grew() -> None:
    blocks = [Allocation(1, 700, 20, None, Category.ACTIVATIONS, Phase.FORWARD, "layer1")]
    timeline = MemoryTimeline(blocks, [Mark(0, Phase.FORWARD)], 0, 100)
    row = run_trial(Trial({}, lambda _: budget("600 B").check(timeline)))
    assert (row["completed"], row["failed_in"], row["wanted_bytes"]) == (False, "forward", 700)


def test_other_errors_are_no_rows() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_trial(failing(RuntimeError("shapes differ")))


def test_the_rows_after_a_failed_one_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    trials = [failing(torch.OutOfMemoryError(CUDA_MESSAGE)), Trial({"batch": 1}, lambda _: {})]
    rows = run_trials(trials, CPU, "resnet50 on a card")
    assert [row["completed"] for row in rows] == [False, True]
    assert "resnet50 on a card: 100%" in capsys.readouterr().err, "the progress bar"


def test_no_row_is_begun_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10))
    monkeypatch.setattr(experiment.time, "monotonic", lambda: next(clock))
    trials = [Trial({"batch": n}, lambda _: {}) for n in range(4)]
    assert [row["batch"] for row in run_trials(trials, CPU, "x", ends=1.5)] == [0, 1]


# The largest batch


@given(st.integers(0, 5000), st.integers(1, 600), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_the_search_finds_the_largest(limit: int, start: int, step: int) -> None:
    asked: list[int] = []
    found = resnet50.largest(lambda n: asked.append(n) or n <= limit, start, step)
    assert found == limit // step * step
    assert len(asked) == len(set(asked)) <= 3 + 2 * math.log2(max(limit, start) + 1)


@pytest.mark.parametrize("limit", [40, 0])
def test_the_largest_batch_under_the_cap(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caps: set[int] = set()

    class Step:
        steps_skipped = False

        def __init__(self, case: resnet50.BatchSeries, batch: int, stage: Stage) -> None:
            self.batch = batch

        def measure(self, *, timed_steps: int, within: Any) -> Measurement:
            caps.add(within.limit_bytes)
            if self.batch > limit:
                raise OverBudgetError("over")
            return a_measurement({}, items=self.batch)

    monkeypatch.setattr(resnet50, "TrainingStep", Step)
    case = resnet50.BatchSeries(resnet50.CUDA_GRIDS[1], FP32, CPU)
    row = run_trial(Trial({}, lambda stage: resnet50._largest(case, stage)))
    assert (row["completed"], row["batch"]) == (True, limit)
    assert [batch for batch, fits in row["tried"] if fits][-1:] == [limit][: limit > 0]
    assert ("peak_bytes" in row) == (limit > 0)
    assert caps == {16 * 10**9}


def test_the_search_does_not_hide_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(resnet50, "TrainingStep", refuse)
    with pytest.raises(RuntimeError, match="shapes differ"):
        resnet50._fits(resnet50.BatchSeries(resnet50.CUDA_GRIDS[0], FP32, CPU), 1, Stage())


# What a row keeps of a measurement


def a_measurement(allocator_bytes: dict[str, int], items: int = 8) -> Measurement:
    block = Allocation(1, 1024, 0, None, Category.PARAMETERS, Phase.BEFORE_FORWARD, "")
    timeline = MemoryTimeline([block], [Mark(0, Phase.FORWARD)], 0, 100)
    seconds = (0.5, 0.25, 0.4)
    return Measurement(
        "step",
        timeline,
        Evidence.MEASURED,
        "a card",
        seconds,
        items,
        "images",
        "allocator",
        allocator_bytes,
    )


def test_a_gpu_row_checks_the_meter() -> None:
    told = {"requested peak": 1000, "allocated peak": 2048, "reserved peak": 4096}
    row = measured_row(a_measurement(told | {"used on the device": 9000}))
    assert (row["meter_to_requested"], row["meter_to_allocated"]) == (1.024, 0.5)
    assert (row["reserved_peak_bytes"], row["used_on_the_device_bytes"]) == (4096, 9000)
    assert (row["step_seconds"], row["images_per_second"]) == ([0.5, 0.25, 0.4], 20.0)
    assert row["breakdown"] == {"parameters": 1024}
    assert not [key for key in measured_row(a_measurement({})) if re.match("meter_to", key)]
