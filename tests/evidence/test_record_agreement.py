"""What a record of a GPU contradicts is said; and `--minutes` begins nothing after its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_programs import PROGRAMS

from evidence.record import __main__ as command
from evidence.record import resnet50
from evidence.record.agreement import disagreements
from evidence.record.store import Record
from utils.simulation import simulate

HASH = "0123456789abcdef0123456789abcdef01234567"


def gpu_record(device_type: str = "cuda", **row: Any) -> Record:
    good = {
        "batch": 64,
        "completed": True,
        "peak_bytes": 100,
        "breakdown": {"parameters": 100},
        "meter_to_requested": 1.0,
        "meter_to_allocated": 0.99,
    }
    origin = {"device": "a card", "device_type": device_type}
    return Record("resnet50", origin, {}, [good | row])


def test_figures_that_agree_are_not_mentioned() -> None:
    assert disagreements(gpu_record()) == []


@pytest.mark.parametrize(
    "row, says",
    [
        ({"meter_to_requested": 1.006}, "counts 1.0060 of what the CUDA allocator has requested"),
        ({"meter_to_allocated": 0.97}, "counts 0.9700 of what the CUDA allocator has allocated"),
        ({"peak_bytes": 101}, "adds up to 100 bytes, the peak is 101"),
    ],
)
def test_each_contradiction_is_a_sentence(row: dict[str, Any], says: str) -> None:
    (found,) = disagreements(gpu_record(**row))
    assert found.startswith("resnet50, batch 64: ") and says in found


def test_rows_without_memory_and_records_of_a_cpu_are_left_out() -> None:
    assert disagreements(gpu_record(completed=False, meter_to_requested=2.0)) == []
    assert disagreements(gpu_record("cpu", meter_to_requested=2.0)) == []


def test_no_experiment_begins_after_its_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(resnet50, "CPU_GRIDS", (resnet50.Grid("cifar", 32, (1,)),))
    assert command.main(["resnet50", "--minutes", "-1", "--commit", HASH], root=tmp_path) == 0
    assert "not begun: resnet50." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "an experiment ran after its time"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_of_the_gpu_tests_run(name: str) -> None:
    """On a machine without one at least their code is known to run, simulated."""
    build, step = PROGRAMS[name]
    assert simulate(build, step, device="A100 80GB", values=True).peak_bytes > 0, name
