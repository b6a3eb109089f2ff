"""Small tools of lesson 19: what a layer keeps, what it computes, and ranks that work and wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from utils.ranks import run_ranks


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that stay from forward to backward of `layer`, but for its parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(x)
    size = sum(size for place, size in kept.items() if place not in own)
    out.sum().backward()
    return size


def forward_flops(layer: nn.Module, x: Tensor) -> int:
    """Floating-point operations of one forward, of its matrix products."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops()


def adam_bytes(layer: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes of parameters, gradients and AdamW's two moments after `step` and an update."""
    optimizer = torch.optim.AdamW(layer.parameters())
    step()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return sum(t.numel() * t.element_size() for t in [*layer.parameters(), *gradients, *states])


def waiting_share(rows: Sequence[int], seconds_a_row: float) -> float:
    """The share of a step that the mean rank waits, if each works `seconds_a_row` on its rows.

    Ranks sleep, which needs no core. Of three steps the shortest counts: what else a machine does can only make
    one longer.
    """
    steps = zip(*run_ranks(_work_and_wait, len(rows), tuple(rows), seconds_a_row), strict=True)
    shortest = min(steps, key=lambda step: max(work + wait for work, wait in step))
    return sum(wait / (work + wait) for work, wait in shortest) / len(rows)


def _work_and_wait(rows: Sequence[int], seconds_a_row: float) -> list[tuple[float, float]]:
    found = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        time.sleep(rows[dist.get_rank()] * seconds_a_row)
        done = time.perf_counter()
        dist.barrier()
        found.append((done - start, time.perf_counter() - done))
    return found
