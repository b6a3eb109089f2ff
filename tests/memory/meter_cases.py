"""Training steps that the meter's tests measure, and a second way to count their bytes.

`second_count` shares no code with the meter. PyTorch's CPU allocator keeps a running total of
its own while a profiler is on, in C++, and writes it into every memory event of the trace; the
count here is the highest such total within one step, relative to the step's start, plus the
sizes of the tensors that existed before, added up one by one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH = 96, 24, 32


@dataclass(frozen=True)
class MeteredProgram:
    """A model, its step, and the tensors that go into the model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    step: Callable[[], Any]
    inputs: tuple[torch.Tensor, ...]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model of three blocks; `reentrant` is None for no checkpointing."""

    def __init__(self, reentrant: bool | None = None, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.reentrant = reentrant
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def mlp() -> nn.Sequential:
    """A small perceptron with buffers."""
    return nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))


def classify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    *,
    zero_first: bool = True,
    set_to_none: bool = True,
    micro_batches: int = 1,
) -> MeteredProgram:
    """A classifier's step over `micro_batches` slices of `images`."""
    labels = torch.arange(len(images)) % 10

    def step() -> None:
        if zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        for x, y in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)

    return MeteredProgram(model, optimizer, step, (images,))


def speak(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: bool = False,
    batch: int = 4,
) -> MeteredProgram:
    """A language model's step with AdamW unless told otherwise."""
    chosen = optimizer or torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    tokens = torch.arange(batch * LENGTH).remainder(VOCABULARY).view(batch, LENGTH)

    def step() -> None:
        chosen.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        chosen.step()

    return MeteredProgram(model, chosen, step, (tokens,))


def infer(model: nn.Module, *inputs: torch.Tensor) -> MeteredProgram:
    """A step of inference, without an optimizer."""
    model.eval()

    def step() -> None:
        with torch.no_grad():
            model(*inputs)

    return MeteredProgram(model, None, step, inputs)


class Count(NamedTuple):
    """Bytes of one step by the second way of counting."""

    peak_bytes: int
    end_bytes: int


def second_count(case: MeteredProgram, *, warmup: int = 1, extra_bytes: int = 0) -> Count:
    """Count one step after `warmup` steps; `extra_bytes` existed before besides the states."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        for _ in range(warmup):
            case.step()
        before = extra_bytes + sum(map(tensor_bytes, existing(case)))
        with torch.profiler.record_function("counted step"):
            case.step()
    totals, first = _running_totals(_trace(profiler))
    return Count(before + max(totals) - first, before + totals[-1] - first)


def existing(case: MeteredProgram) -> Iterator[torch.Tensor]:
    """Parameters, gradients, buffers, optimizer state and inputs, as they are now."""
    parameters = list(case.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return chain(
        parameters, gradients, case.model.buffers(), state_tensors(case.optimizer), case.inputs
    )


def state_tensors(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """The tensors of the optimizer's state."""
    for state in optimizer.state.values() if optimizer else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Elements times bytes per element."""
    return tensor.numel() * tensor.element_size()


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of several tensors."""
    return sum(map(tensor_bytes, tensors))


def _trace(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def _running_totals(trace: list[dict[str, Any]]) -> tuple[list[int], int]:
    """The allocator's totals from the counted step's start on; the first is the start's own."""
    window = next(e for e in trace if e["name"] == "counted step" and e["ph"] == "X")
    start, end = window["ts"], window["ts"] + window["dur"]
    rows = [(e["ts"], e["args"]) for e in trace if e["name"] == "[memory]"]
    inside = [args for time, args in sorted(rows, key=lambda row: row[0]) if start <= time <= end]
    first = inside[0]["Total Allocated"] - inside[0]["Bytes"]
    return [first, *(args["Total Allocated"] for args in inside)], first
