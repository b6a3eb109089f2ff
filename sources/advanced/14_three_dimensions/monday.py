"""Runs the lines of lesson 14's last cell."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from utils.catalog import ModelShape
from utils.lessons.blocks import run_block
from utils.parallel import ParallelDims
from utils.ranks import run_ranks

BOX, OTHER = ParallelDims(pp=2, shard=2, tp=2), ParallelDims(pp=4, shard=1, tp=2)
RATE = 3e-3
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


class _Found(NamedTuple):
    """Of one rank: each step's norm, the losses of a last stage, and its share of a stage's values."""

    norms: list[float]
    losses: list[float]
    held: int


def _on_a_rank(text: str, dtype: torch.dtype, arguments: Sequence[str]) -> _Found:
    dist.destroy_process_group()  # the script makes its own
    sys.argv = ["train.py", *arguments]
    torch.set_default_dtype(dtype)
    found = run_block(text)
    held = sum(p.to_local().numel() for p in found["stage"].parameters())
    return _Found(found["norms"], found["losses"], held)


def _arguments(box: ParallelDims, *folders: str) -> list[str]:
    return [*(str(box.sizes[axis]) for axis in ("pp", "shard", "tp")), *folders]


def _alone(text: str, dtype: torch.dtype) -> tuple[nn.Module, list[float], list[float]]:
    """The toy's model, norms and losses in one process, without a line of what follows the toy."""
    toy, marked, _ = text.partition("# ---- From here on")
    assert marked, "the block says where the toy ends"
    with _argv(_arguments(ParallelDims(), "unused")), _default_dtype(dtype):
        names = run_block(toy)
        model = names["Stage"](0)
    norms, losses = [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for inputs, targets in names["loader"](0):
        loss = names["loss_fn"](model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms, losses


@contextlib.contextmanager
def _argv(arguments: Sequence[str]) -> Iterator[None]:
    came_with, sys.argv = sys.argv, ["train.py", *arguments]
    try:
        yield
    finally:
        sys.argv = came_with


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _apart(found: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, right, strict=True))


def block_1(text: str) -> None:
    """Eight ranks train the toy as one process, in float64 exactly; what they save loads into one.

    Started again from the second step, they go on as if never interrupted, with other sizes too.
    """
    exact = text.replace("torch.bfloat16", "torch.float64").replace(
        "torch.float32", "torch.float64"
    )
    exact = exact.replace(".float()", ".double()")
    assert exact.count("torch.float64") == 2, "the block names the types of products and of sums"
    for lines, dtype, near in ((exact, torch.float64, 1e-10), (text, torch.float32, 0.02)):
        model, norms, losses = _alone(lines, dtype)  # other draws in another type
        assert min(norms) > 1.2 and losses[-1] < losses[0], f"{norms}: clipped; {losses}: it learns"
        with tempfile.TemporaryDirectory() as folder:
            first, resume = f"{folder}/first", f"{folder}/first/step-2"
            starts = (
                (BOX, 0, _arguments(BOX, first)),
                (BOX, 2, _arguments(BOX, f"{folder}/again", resume)),
                (OTHER, 2, _arguments(OTHER, f"{folder}/other", resume)),
            )
            for box, done, arguments in starts:
                ranks = run_ranks(
                    _on_a_rank, box.ranks, lines, dtype, arguments, timeout_seconds=200
                )
                _check(ranks, box, norms[done:], losses[done:], near)
                whole = sum(p.numel() for p in model.parameters())
                held = max(found.held for found in ranks)
                assert held < 0.2 * whole, f"a rank holds {held} of {whole}: is it sharded?"
            loaded = {
                "model": {
                    k: torch.zeros_like(v, dtype=dtype) for k, v in model.state_dict().items()
                }
            }
            with warnings.catch_warnings():  # that it loads in a single process: it should
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(loaded, checkpoint_id=f"{first}/step-{len(norms)}", no_dist=True)
        for name, right in model.state_dict().items():
            saved = loaded["model"][name]
            assert torch.allclose(saved, right, rtol=0, atol=1e-10 if near < 1e-6 else 0.02), name


def _check(
    ranks: Sequence[_Found],
    box: ParallelDims,
    norms: Sequence[float],
    losses: Sequence[float],
    near: float,
) -> None:
    """Every rank logs the norms of one process, and the last stages its losses."""
    for rank, found in enumerate(ranks):
        assert _apart(found.norms, norms) < near, f"norms of {found.norms}; {norms} are due"
        last = box.coordinates(rank)["pp"] == box.pp - 1
        due = losses if last else []
        assert len(found.losses) == len(due), f"rank {rank}: losses of {found.losses}"
        assert not last or _apart(found.losses, due) < near, f"rank {rank}: {found.losses}; {due}"


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
