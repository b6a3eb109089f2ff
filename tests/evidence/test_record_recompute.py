"""The checkpointing experiment: tiny rows on the CPU, its step simulated, and a GPU's grid."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from evidence.record import __main__ as command
from evidence.record import gpt1b_recompute as experiment
from evidence.record.store import recorded
from utils.models import TransformerConfig
from utils.simulation import simulate

HASH = "0123456789abcdef0123456789abcdef01234567"
CPU = torch.device("cpu")
LESSON = Path(__file__).parents[2] / "sources/intermediate/05_checkpointing/lesson.py"


@pytest.mark.slow
def test_one_row_of_each_way_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(experiment, "TIMED_STEPS", 1)
    assert command.main(["gpt1b_recompute", "--commit", HASH], root=tmp_path) == 0
    (record,) = recorded("gpt1b_recompute", tmp_path)
    rows = {row["checkpointed"]: row for row in record.rows}
    assert list(rows) == list(experiment.WAYS)
    assert len({row["first_loss"] for row in rows.values()}) == 1, "bit-equal"
    assert rows["every block"]["peak_bytes"] < rows["none"]["peak_bytes"]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(2 * 64 / row["median_step_seconds"])
        # 4 blocks of 4 x 128^2 + 3 x 128 x 352 weights and two norms, the last norm, the embedding.
        count = 4 * (4 * 128**2 + 3 * 128 * 352 + 256) + 128 + 256 * 128
        assert row["breakdown"]["parameters"] == 4 * count


def test_the_step_of_the_large_model_simulated() -> None:
    config = replace(experiment.LARGE, layers=20)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens = experiment.batch(config, 1, experiment.LENGTH, CPU)
        optimizer.zero_grad()
        experiment._loss(model, tokens).backward()  # a simulated loss has no value to return
        optimizer.step()

    peaks = {
        way: simulate(partial(experiment.build, config, way, CPU), step).peak_bytes
        for way in experiment.WAYS
    }
    assert peaks["every block"] < peaks["every 2nd"] < peaks["none"]
    assert peaks["every block"] < peaks["selective"] < peaks["none"]


def test_a_gpu_runs_the_whole_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "choose_dtype", lambda _: (torch.bfloat16, ""))
    found = experiment.trials(torch.device("cuda"))
    assert len(found) == 4 * 4
    assert {trial.settings["layers"] for trial in found} == {24}
    assert {trial.settings["autocast"] for trial in found} == {"bfloat16"}


def test_the_lesson_simulates_the_same_model() -> None:
    (line,) = re.findall(r"^large = (TransformerConfig\(.*\))$", LESSON.read_text(), re.MULTILINE)
    assert eval(line, {"TransformerConfig": TransformerConfig}) == experiment.LARGE
