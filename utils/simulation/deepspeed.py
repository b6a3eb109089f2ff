"""Where DeepSpeed's ZeRO looks into tensors or remembers a world, answered while a simulation runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

_ZERO = "deepspeed.runtime.zero."
# What it keeps of the first process group that it sees, for ever.
_REMEMBERED = (("deepspeed.comm.comm", "cdb"), ("deepspeed.utils.groups", "_WORLD_GROUP"))
_ACCELERATOR = "deepspeed.accelerator."


@contextlib.contextmanager
def zero_without_data() -> Iterator[None]:
    """Inside, engines of ZeRO-1, 2 and 3 train on tensors without data. Undone at the end.

    ZeRO asks four things of values: whether a gradient overflowed and whether its norm is finite
    (answered so that the step is taken), whether all ranks run the same modules in the same
    order (there is one rank), and whether a partition is aligned in memory.
    """
    stages = importlib.import_module(_ZERO + "stage_1_and_2")
    stage_3 = importlib.import_module(_ZERO + "stage3")
    order = importlib.import_module(_ZERO + "partitioned_param_coordinator")
    sharded = stages.DeepSpeedZeroOptimizer
    with contextlib.ExitStack() as stack:
        for module, name in _REMEMBERED:
            stack.enter_context(mock.patch.object(importlib.import_module(module), name, None))
        stack.enter_context(_on_cpu())
        # Stage 3 puts a linear function of its own in the place of PyTorch's, for good.
        stack.enter_context(mock.patch.object(F, "linear", F.linear))
        stack.enter_context(mock.patch.object(sharded, "has_overflow", lambda *_: False))
        for module in (stages, stage_3):
            stack.enter_context(mock.patch.object(module, "is_invalid_grad_norm", lambda _: False))
        stack.enter_context(mock.patch.object(order, "assert_ints_same_as_other_ranks", lambda _: None))
        stack.enter_context(mock.patch.object(sharded, "__init__", _with_addresses(sharded.__init__)))
        yield


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Simulated tensors are on `cpu`, whatever DeepSpeed was loaded for."""
    cpu = importlib.import_module(_ACCELERATOR + "cpu_accelerator").CPU_Accelerator()
    chosen = importlib.import_module(_ACCELERATOR + "real_accelerator")
    with (
        mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}),
        mock.patch.object(chosen, "ds_accelerator", cpu),
    ):
        yield


def _with_addresses(init: Callable[..., None]) -> Callable[..., None]:
    """Storages as if at aligned addresses, in here alone: a kernel elsewhere would follow one."""

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.Tensor, "data_ptr", _offset_bytes):
            init(*args, **kwargs)

    return call


def _offset_bytes(tensor: torch.Tensor) -> int:
    return tensor.storage_offset() * tensor.element_size()
