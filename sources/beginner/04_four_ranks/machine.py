"""Where this lesson's ranks compute: on a GPU each if there are four, else all on the CPU."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist

from utils.checked import check_public

__all__ = ["my_device", "where"]

RANKS = 4


def my_device() -> torch.device:
    """The device of this rank; of one process alone, that of rank 0."""
    mine = dist.get_rank() if dist.is_initialized() else 0
    return torch.device("cuda", mine) if _on_gpus() else torch.device("cpu")


def where() -> str:
    """The machine in words, for titles."""
    if _on_gpus():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, 1 thread a rank"


@functools.cache
def _on_gpus() -> bool:
    return torch.cuda.device_count() >= RANKS


check_public(globals())
