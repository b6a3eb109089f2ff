"""The rows of final accuracy: paired seeds on a GPU, and one tiny run on the CPU."""

from __future__ import annotations

import pytest
import torch

from evidence.record import cifar_accuracy as accuracy
from evidence.record.experiment import Stage
from utils.data import Cifar10
from utils.techniques.precision import FP32

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_accuracy_over_paired_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    asked = [dict(trial.settings) for trial in accuracy.trials(CUDA)]
    rows = [(r["precision"], r["seed"]) for r in asked if r["quantity"] == "final accuracy"]
    names = ("fp32", "tf32", "amp fp16", "amp bf16")
    assert rows == [(name, seed) for name in names for seed in range(5)]
    assert accuracy.trials(CPU) == []


def test_an_accuracy_row_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.arange(32).view(-1, 1, 1, 1).expand(32, 3, 32, 32).to(torch.uint8) * 8
    data = Cifar10(images, torch.arange(32) // 16, "drawn here", tuple("0123456789"))
    monkeypatch.setattr(accuracy, "cifar10", lambda split: data)
    small = {"DEPTH": 18, "EPOCHS": 2, "BATCH": 8, "STEPS_PER_EPOCH": 3}
    for name, value in small.items():
        monkeypatch.setattr(accuracy, name, value)
    rows = [accuracy._accuracy(FP32, 1, CPU, Stage()) for _ in range(2)]
    assert rows[0] == rows[1], "a seed decides everything"
    assert (rows[0]["data"], rows[0]["optimizer_steps"]) == ("drawn here", 6)
    assert 0 <= rows[0]["final_accuracy_percent"] <= 100
    assert rows[0]["last_epoch_loss"] > 0
