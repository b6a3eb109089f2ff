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
ROWS, LIMIT = 8, 1e-3
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


def _loss(stage: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return stage(rows).square().mean()


def _rows() -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, 16, generator=random, dtype=torch.float64)


def _on_a_rank(text: str) -> tuple[float, float, int]:
    """The norm, the norm of the clipped gradients, and the values that this rank holds."""
    at = BOX.coordinates(dist.get_rank())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    sizes = {"pp": 2, "dp": 2, "tp": 2, "device": "cpu"}
    found = run_block(text, stage=_stage(at["pp"]), plan=plan, **sizes)
    half = ROWS // 2 * at["shard"]
    _loss(found["stage"], _rows()[half : half + ROWS // 2]).backward()
    before, after = found["clip"](LIMIT), found["clip"](LIMIT)
    held = sum(p.to_local().numel() for p in found["stage"].parameters())
    return float(before), float(after), held


def block_1(text: str) -> None:
    """Eight ranks: the norm of one process, clipped on all alike, and a quarter of a stage on each."""
    square = 0.0
    for number in range(2):
        stage = _stage(number)
        _loss(stage, _rows()).backward()
        square += sum(
            float(p.grad.square().sum()) for p in stage.parameters() if p.grad is not None
        )
    whole = sum(p.numel() for p in _stage(0).parameters())
    for before, after, held in run_ranks(_on_a_rank, BOX.ranks, text, timeout_seconds=100):
        assert abs(before / square**0.5 - 1) < 1e-12, (
            f"a norm of {before}, and {square**0.5} is due"
        )
        assert abs(after / LIMIT - 1) < 1e-2, f"clipped to {after}, not {LIMIT}"
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
