"""The last cell's blocks: a plan and its files, and the MFU and days that measured steps say."""

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
from utils.planner import Batch, Cluster, Plan, cost, estimate, goodput
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
    """Ten steps as long as the planner's: its MFU, and its days with what failures leave."""
    cluster, batch = Cluster(gpu="A100-80GB", nodes=1), Batch(sequences=64, sequence_length=2048)
    planned = estimate("llama-2-7b", cluster, Plan(dp=8, zero_stage=1), batch)
    clock, steps = iter([0.0, 10 * planned.step_seconds]), []
    left, shape = goodput(cluster, spares=1), planned.model

    def step() -> Tensor:
        steps.append(1)
        return torch.ones(())

    with mock.patch.object(time, "perf_counter", lambda: next(clock)):
        found = run_block(
            text,
            step=step,
            parameters=shape.parameter_count,
            layers=shape.layers,
            width=shape.hidden,
            sequence_length=2048,
            tokens_per_step=batch.tokens,
            tokens=1e11,
            gpus=8,
            peak_flops=312e12,
            left=left,
        )
    assert len(steps) == 11, f"{len(steps)} steps, not ten after a first one"
    days = cost(planned, 1e11, left).days
    assert abs(found["days"] / days - 1) < 1e-9, f"{found['days']} days, the planner's bill {days}"
    assert abs(found["mfu"] / planned.mfu - 1) < 0.03, "not the planner's MFU, the embedding aside"


def block_3(text: str) -> None:
    """Trainer counts the tokens of its steps, and the first step is not timed."""
    seconds, tokens, ends = run_ranks(_trial, 1, text)[0]
    assert tokens == 16, f"{tokens} tokens a step, of one row of 16"
    assert len(ends) == 11, f"{len(ends)} ends of steps"
    assert abs(seconds - (ends[-1] - ends[0]) / 10) < 1e-9, "not the mean of the last ten steps"


def _trial(text: str) -> tuple[float, float, list[float]]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.distributed.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        names = run_block(text, model=_Language(), dataset=_Texts())
    return names["seconds"], names["tokens_per_step"], names["clock"].ends


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
