"""The last cell's blocks: a plan and its files, and the MFU and days that measured steps say."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from utils.lessons.blocks import run_block
from utils.planner import Batch, Cluster, Plan, cost, estimate, goodput


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
    """Ten steps as long as the planner's: its MFU, and its days with what failures leave.

    A step gives no loss back, as on the first stage of several, and the clock is read where the GPU is done.
    """
    cluster, batch = Cluster(gpu="A100-80GB", nodes=1), Batch(sequences=64, sequence_length=2048)
    planned = estimate("llama-2-7b", cluster, Plan(dp=8, zero_stage=1), batch)
    clock, events = iter([0.0, 10 * planned.step_seconds]), list[str]()
    left, shape = goodput(cluster, spares=1), planned.model

    def step() -> None:
        events.append("step")

    def wait() -> None:
        events.append("wait")

    def read() -> float:
        events.append("read")
        return next(clock)

    with (
        mock.patch.object(time, "perf_counter", read),
        mock.patch.object(torch.cuda, "synchronize", wait),
    ):
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
    asked = ["step", "wait", "read", *10 * ["step"], "wait", "read"]
    assert events == asked, f"{events}: not ten steps after a first one, each end awaited"
    days = cost(planned, 1e11, left).days
    assert abs(found["days"] / days - 1) < 1e-9, f"{found['days']} days, the planner's bill {days}"
    assert abs(found["mfu"] / planned.mfu - 1) < 0.03, "not the planner's MFU, the embedding aside"
