"""What plain PyTorch does differently on tensors without data, put right while a simulation runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from utils.simulation.watcher import StorageWatcher


@contextlib.contextmanager
def patched(watcher: StorageWatcher) -> Iterator[None]:
    """Inside, modules convert and storages resize as they do with data. Undone at the end."""
    resize = torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        watcher.resized(storage)
        return result

    with (
        mock.patch.object(nn.Module, "_apply", _convert),
        mock.patch.object(torch.UntypedStorage, "resize_", watched_resize),
        _code_tables_of_bitsandbytes(),
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


def _code_tables_of_bitsandbytes() -> contextlib.AbstractContextManager[Any]:
    """Its eight-bit optimizers read their table of 256 values back as numbers, once.

    The table depends on nothing, so it is computed with data and then copied.
    """
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is None:
        return contextlib.nullcontext()
    make = functional.create_dynamic_map

    def table(*args: Any, **kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            values = make(*args, **kwargs).tolist()
        return torch.tensor(values)

    return mock.patch.object(functional, "create_dynamic_map", table)
