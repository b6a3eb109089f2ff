"""The last cell's blocks: a plan and its files, and days that a measured step says."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from utils.lessons.blocks import run_block
from utils.planner import Batch, Cluster, Plan, estimate
from utils.ranks import run_ranks


def block_1(text: str) -> None:
    """A plan that fits, its bill as ranges, and files that name its layout."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names = run_block(text)
        best, bill = names["plans"].best, names["bill"]
        assert best is not None and best.fits and not best.tight, "no plan with headroom"
        assert bill.days_interval[0] < bill.days < bill.days_interval[1], "no range of days"
        written = Path("run", "notes.md").read_text(encoding="utf-8")
        assert "torchrun" in written, f"the files say nothing of a launch: {os.listdir('run')}"


def block_2(text: str) -> None:
    """Ten steps as long as the planner's: its days, their dollars, and its MFU."""
    cluster, batch = Cluster(gpu="A100-80GB", nodes=1), Batch(sequences=64, sequence_length=2048)
    planned = estimate("llama-2-7b", cluster, Plan(dp=8, zero_stage=1), batch)
    clock = iter([0.0, 10 * planned.step_seconds])
    model, parameters = nn.Linear(3, 2), 8
    with mock.patch.object(time, "perf_counter", lambda: next(clock)):
        found = run_block(
            text,
            model=model,
            step=lambda: model(torch.ones(3)).sum(),
            tokens_per_step=batch.tokens,
            tokens=1e11,
            gpus=8,
            peak_flops=312e12,
            usd_per_gpu_hour=2.0,
        )
    days = 1e11 / planned.tokens_per_second / 86_400
    assert abs(found["days"] / days - 1) < 1e-9, f"{found['days']} days, planned {days}"
    assert abs(found["usd"] / (days * 24 * 8 * 2.0) - 1) < 1e-9, f"{found['usd']} dollars"
    whole = found["mfu"] * planned.model.parameter_count / parameters
    assert 0.8 < whole / planned.mfu < 1.2, "not the planner's MFU, attention aside"


def block_3(text: str) -> None:
    """Trainer counts the tokens of ten steps, and the days follow from its own seconds."""
    seen, days, runtime = run_ranks(_trial, 1, text)[0]
    assert seen == 10 * 8 * 16, f"{seen} tokens seen, of ten steps with 8 rows of 16"
    assert abs(days * 86_400 / (1e6 / seen * runtime) - 1) < 1e-9, "other days"


def _trial(text: str) -> tuple[int, float, float]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.distributed.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names = run_block(text, model=_Language(), dataset=_Texts(), tokens=1e6)
    return names["trainer"].state.num_input_tokens_seen, names["days"], names["runtime"]


class _Language(nn.Module):
    """The smallest language model that Trainer takes."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) + index) % 11
        return {"input_ids": tokens, "labels": tokens}
