"""Runs the lines of lesson 14's last cell."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from utils.catalog import ModelShape
from utils.lessons.blocks import run_block
from utils.parallel import ParallelDims
from utils.ranks import run_ranks

BOX, OTHER = ParallelDims(pp=2, shard=2, tp=2), ParallelDims(pp=4, shard=1, tp=2)
ROWS, STEPS, RATE = 8, 4, 3e-4
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


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.relu(self.up(rows)))


class _Stage(nn.Module):
    """Blocks under their numbers in the whole model of four."""

    def __init__(self, numbers: Iterable[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.blocks[str(number)] = _Block().to(dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            rows = block(rows)
        return rows


def _plan(numbers: Iterable[int]) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for n in numbers:
        styles |= {f"blocks.{n}.up": ColwiseParallel(), f"blocks.{n}.down": RowwiseParallel()}
    return styles


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 10 * (outputs - targets).square().mean()


def _batches(first: int, end: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(7)
    drawn = (torch.randn(ROWS, 16, generator=random, dtype=torch.float64) for _ in range(STEPS))
    return [(rows[first:end].to(dtype), rows[first:end].flip(1).to(dtype)) for rows in drawn]


class _Found(NamedTuple):
    """Of one rank: each step's norm, the losses of a last stage, and how many values it holds.

    `resumed` are norms and losses of a second start, from the first one's checkpoint of two steps.
    """

    norms: list[float]
    losses: list[float]
    held: int
    resumed: tuple[list[float], list[float]]


def _yours(box: ParallelDims, dtype: torch.dtype) -> dict[str, object]:
    """What the block asks a reader for, of one rank."""
    at, layers, rows = box.coordinates(dist.get_rank()), 4 // box.pp, ROWS // box.shard
    first = rows * at["shard"]
    return {
        "build": lambda place: _Stage(range(layers * place, layers * (place + 1)), dtype),
        "plan": _plan(range(layers * at["pp"], layers * (at["pp"] + 1))),
        "loader": _batches(first, first + rows, dtype),
        "loss_fn": _loss,
        "device": "cpu",
        "micro_batches": box.pp,
        "save_every": 2,
        **{axis: box.sizes[axis] for axis in ("pp", "shard", "tp")},
    }


def _on_a_rank(text: str, dtype: torch.dtype, folder: str) -> _Found:
    yours = _yours(BOX, dtype)
    found = run_block(text, folder=folder, resume=None, **yours)
    held = sum(p.to_local().numel() for p in found["stage"].parameters())
    again = run_block(text, folder=f"{folder}/again", resume=f"{folder}/step-2", **yours)
    return _Found(found["norms"], found["losses"], held, (again["norms"], again["losses"]))


def _with_other_sizes(text: str, dtype: torch.dtype, folder: str) -> list[float]:
    """Norms of a rank that goes on from a checkpoint which `BOX` saved after two steps."""
    yours = _yours(OTHER, dtype)
    return run_block(text, folder=f"{folder}/other", resume=f"{folder}/step-2", **yours)["norms"]


def _alone() -> tuple[nn.Module, list[float], list[list[float]]]:
    """The model, norms and losses by replica of one process, which clips most of its steps."""
    model, norms, losses = _Stage(range(4), torch.float64), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for inputs, targets in _batches(0, ROWS, torch.float64):
        outputs = model(inputs)
        pairs = zip(outputs.chunk(2), targets.chunk(2), strict=True)
        losses.append([_loss(rows, right).item() for rows, right in pairs])
        _loss(outputs, targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms, losses


def _apart(found: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, right, strict=True))


def block_1(text: str) -> None:
    """Eight ranks train as one process, in float64 exactly; what they save loads into one process.

    Started again from the second step, they go on as if never interrupted, with other sizes too.
    """
    model, norms, losses = _alone()
    assert max(norms) > 1.5, f"norms of {norms}: nothing is clipped"
    whole = sum(p.numel() for p in model.parameters())
    exact = text.replace("torch.bfloat16", "torch.float64").replace(
        "torch.float32", "torch.float64"
    )
    assert exact.count("torch.float64") == 2, "the block names the types of products and of sums"
    for lines, dtype, near in ((exact, torch.float64, 1e-10), (text, torch.float32, 0.05)):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(_on_a_rank, BOX.ranks, lines, dtype, folder, timeout_seconds=200)
            start = (OTHER.ranks, lines, dtype, folder)
            others = run_ranks(_with_other_sizes, *start, timeout_seconds=200)
            loaded = {"model": _Stage(range(4), dtype).state_dict()}
            with warnings.catch_warnings():  # that it loads in a single process: it should
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(loaded, checkpoint_id=f"{folder}/step-{STEPS}", no_dist=True)
        for found in others:
            assert len(found) == STEPS - 2 and _apart(found, norms[2:]) < near, f"{found}: {norms}"
        for rank, found in enumerate(ranks):
            assert _apart(found.norms, norms) < near, f"norms of {found.norms}; {norms} are due"
            for more, first in zip(found.resumed, (found.norms, found.losses), strict=True):
                assert len(more) == len(first[2:]), f"{len(more)} steps after two of {STEPS}"
                assert not more or _apart(more, first[2:]) < near, f"{more}; {first[2:]} are due"
            assert found.held < 0.15 * whole, (
                f"a rank holds {found.held} of {whole}: is it sharded?"
            )
            at = BOX.coordinates(rank)
            due = [row[at["shard"]] for row in losses] if at["pp"] else []
            assert _apart(found.losses, due) < near if due else not found.losses, f"{rank}: {found}"
        for name, right in model.state_dict().items():
            saved = loaded["model"][name].double()
            assert torch.allclose(saved, right, rtol=0, atol=1e-10 if near < 1e-6 else 3e-3), name


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
