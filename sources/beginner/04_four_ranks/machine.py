"""Where this lesson's ranks compute: on a GPU each if there are four, else all on the CPU."""

from __future__ import annotations

import functools
import os
import time

import torch
import torch.distributed as dist

from utils.checked import check_public
from utils.techniques.precision import computes, low_precision

__all__ = ["is_fast", "low_dtype", "my_device", "seconds_now", "where"]

RANKS = 4


def my_device() -> torch.device:
    """The device of this rank; of one process alone, that of rank 0."""
    mine = dist.get_rank() if dist.is_initialized() else 0
    return torch.device("cuda", mine) if _on_gpus() else torch.device("cpu")


def low_dtype() -> torch.dtype:
    """bf16, or fp16 where a GPU has no bf16."""
    return low_precision(my_device())[0]


def is_fast() -> bool:
    """Whether the 16-bit type is computed without emulation."""
    return computes(my_device(), low_dtype())


def where() -> str:
    """The machine in words, for titles."""
    if _on_gpus():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, 1 thread a rank"


def seconds_now() -> float:
    """A clock that waits for a GPU: it still works when a call has returned."""
    if _on_gpus():
        torch.cuda.synchronize()
    return time.perf_counter()


@functools.cache
def _on_gpus() -> bool:
    return torch.cuda.device_count() >= RANKS


check_public(globals())
