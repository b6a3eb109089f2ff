"""What plain PyTorch does differently on tensors without data, put right while a simulation runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from utils.simulation.libraries import libraries
from utils.simulation.watcher import StorageWatcher

# DTensor learns the shape of a result by running the operation on whole, unsharded stand-ins.
_SHAPES = "_propagate_tensor_meta_non_cached"


@contextlib.contextmanager
def patched(watcher: StorageWatcher) -> Iterator[None]:
    """Inside, modules convert and storages resize as they do with data. Undone at the end."""
    resize = torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        watcher.resized(storage)
        return result

    work_out = getattr(ShardingPropagator, _SHAPES)

    def unwatched(*args: Any) -> Any:
        before, watcher.paused = watcher.paused, True
        try:
            return work_out(*args)
        finally:
            watcher.paused = before

    with (
        mock.patch.object(nn.Module, "_apply", _convert),
        mock.patch.object(torch.UntypedStorage, "resize_", watched_resize),
        mock.patch.object(nn.init, "_no_grad_trunc_normal_", _without_reading),
        mock.patch.object(ShardingPropagator, _SHAPES, unwatched),
        # Asked in every operation; where DeepSpeed is loaded, each answer opens a library anew.
        mock.patch.object(FakeTensorMode, "avoid_device_init", FakeTensorMode().avoid_device_init),
        libraries(),
    ):
        yield


def _convert(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` by plain assignment: swapping tensors in place fails on fake ones.

    A weight that several modules share stays one weight.
    """
    converted: dict[int, nn.Parameter] = {}
    for owner in module.modules() if recurse else [module]:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    with torch.no_grad():
                        fresh = fn(parameter)
                    if fresh is not parameter:
                        fresh = nn.Parameter(fresh, parameter.requires_grad)
                    converted[id(parameter)] = fresh
                owner._parameters[name] = converted[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = fn(buffer)
    return module


def _without_reading(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """`nn.init.trunc_normal_` redraws until all values lie within (a, b); here there are none."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)
