"""The adapter experiment: tiny rows on the CPU, and the grid that a GPU would run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evidence.record import __main__ as command
from evidence.record import llama7b_adapters
from evidence.record.store import recorded
from utils.models.finetune import METHODS

HASH = "0123456789abcdef0123456789abcdef01234567"


def test_one_row_of_each_method_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(llama7b_adapters, "TIMED_STEPS", 1)
    assert command.main(["llama7b_adapters", "--commit", HASH], root=tmp_path) == 0
    (record,) = recorded("llama7b_adapters", tmp_path)
    assert [row["method"] for row in record.rows] == list(METHODS)
    plain, packed, recomputed, _, whole = (row["breakdown"] for row in record.rows)
    assert packed["parameters"] < plain["parameters"] / 2
    # Two layers, two adapters of rank 8 on 128 x 128 each; fp32, two moments, a step per tensor.
    assert plain["optimizer state"] == 8 * (2 * 2 * 8 * 256) + 4 * 8
    assert whole["optimizer state"] > 20 * plain["optimizer state"]
    assert recomputed["optimizer state"] == plain["optimizer state"]


def test_a_gpu_runs_the_whole_grid() -> None:
    found = llama7b_adapters.trials(torch.device("cuda"))
    assert len(found) == 4 * 3 * 2 + 1, "a full fine-tune is tried once"
    assert {trial.settings["layers"] for trial in found} == {32}
