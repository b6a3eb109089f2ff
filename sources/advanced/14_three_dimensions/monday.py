"""Runs the lines of lesson 14's last cell."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from utils.catalog import ModelShape
from utils.lessons.blocks import run_block
from utils.parallel import ParallelDims
from utils.ranks import run_ranks

BOX = ParallelDims(pp=2, shard=2, tp=2)
ROWS, STEPS = 8, 4
SHAPE = ModelShape(
    name="100B",
    family="llama",
    layers=80,
    hidden=10_240,
    heads=80,
    feedforward=27_648,
    vocabulary=32_000,
    max_sequence=2048,
)


def _stage(number: int) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double()


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 10 * (outputs - targets).square().mean()


def _batches(first: int, end: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(7)
    drawn = (torch.randn(ROWS, 16, generator=random, dtype=torch.float64) for _ in range(STEPS))
    return [(rows[first:end], rows[first:end].flip(1)) for rows in drawn]


def _on_a_rank(text: str) -> tuple[list[float], int]:
    """The norm of each step, and the values that this rank holds."""
    at = BOX.coordinates(dist.get_rank())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    sizes = {"pp": 2, "dp": 2, "tp": 2, "device": "cpu", "micro_batches": 2}
    half = ROWS // 2 * at["shard"]
    loader = _batches(half, half + ROWS // 2)
    found = run_block(
        text, stage=_stage(at["pp"]), plan=plan, loader=loader, loss_fn=_loss, **sizes
    )
    return found["norms"], sum(p.to_local().numel() for p in found["stage"].parameters())


def _alone() -> list[float]:
    """The norms of one process, which clips most of its steps."""
    model, norms = nn.Sequential(_stage(0), _stage(1)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in _batches(0, ROWS):
        _loss(model(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def block_1(text: str) -> None:
    """Eight ranks: the norms of one process over four steps, and a quarter of a stage on each."""
    wanted, whole = _alone(), sum(p.numel() for p in _stage(0).parameters())
    assert max(wanted) > 1.5, f"norms of {wanted}: nothing is clipped"
    for norms, held in run_ranks(_on_a_rank, BOX.ranks, text, timeout_seconds=100):
        gaps = [abs(a / b - 1) for a, b in zip(norms, wanted, strict=True)]
        assert max(gaps) < 1e-10, f"norms of {norms}, and {wanted} are due"
        assert held < 0.3 * whole, f"a rank holds {held} of {whole} values: is it sharded?"


def block_2(text: str) -> None:
    """The plan as files, with its sizes where each tool reads them."""
    came_from = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            job = run_block(text, shape=SHAPE)["job"]
        finally:
            os.chdir(came_from)
        there = {path.name for path in (Path(folder) / "run").iterdir()}
    wanted = {"megatron.sh", "ds_config.json", "train.py", "launch.sh"}
    assert wanted <= there, f"not written: {sorted(wanted - there)}"
    words = " ".join(job.megatron)
    assert "--tensor-model-parallel-size 4" in words and "--pipeline-model-parallel-size 8" in words
    assert job.deepspeed["zero_optimization"]["stage"] == 1, "ZeRO-1 is not in DeepSpeed's JSON"
