"""Autocast in PyTorch's dispatcher: for which operators, and how to pass it by."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_autocast.py")

_EXCLUDE = Shim(
    TORCH,
    "torch._C:_ExcludeDispatchKeyGuard",
    "autocast_off",
    "`torch.autocast(enabled=False)` forgets the copies of weights that autocast keeps",
)
_KEY_SET = Shim(TORCH, "torch._C:DispatchKeySet", "autocast_off", "as for the guard")
_AUTOCAST = Shim(
    TORCH,
    "torch.amp.autocast_mode:autocast.__init__",
    "autocast_as_on_cpu",
    "autocast for `cuda` passes tensors without data by, which are all of `cpu`",
    patched=True,
)
_OPERATORS = Shim(
    TORCH,
    "torch._C:_dispatch_get_all_op_names",
    "autocast_operators",
    "which operators autocast changes stands in PyTorch's dispatcher alone",
)
_HAS_KERNEL = Shim(
    TORCH,
    "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "autocast_operators",
    "as for the names of operators",
)
SHIMS = (_EXCLUDE, _KEY_SET, _AUTOCAST, _OPERATORS, _HAS_KERNEL)


@contextlib.contextmanager
def autocast_as_on_cpu() -> Iterator[None]:
    """Inside, autocast for `cuda` is that for `cpu`, where tensors without data are.

    Without a type of its own it keeps CUDA's, float16.
    """
    init, fast = _AUTOCAST.get(), torch.get_autocast_dtype

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", fast("cuda") if dtype is None else dtype
        init(self, device_type, dtype, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_AUTOCAST.replaced(on_cpu))
        for name in _BY_DEVICE:
            asked = _of_cpu(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, asked))
        yield


# Public functions of `torch` that take a kind of device first; CUDA where it is left out.
_BY_DEVICE = (
    "is_autocast_enabled",
    "set_autocast_enabled",
    "get_autocast_dtype",
    "set_autocast_dtype",
)


def _of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(device_type: Any = "cuda", *args: Any) -> Any:
        if isinstance(device_type, bool):  # the old way: set_autocast_enabled(True)
            return function("cpu", device_type)
        is_off = "get" in function.__name__ and not enabled("cpu")
        return function("cpu" if device_type == "cuda" and not is_off else device_type, *args)

    enabled = torch.is_autocast_enabled
    return asked


def autocast_operators(key: str) -> frozenset[str]:
    """PyTorch's own operators that have a kernel at "AutocastCPU" or "AutocastCUDA"."""
    has_kernel, names = _HAS_KERNEL.get(), _OPERATORS.get()()
    own = (name for name in names if name.startswith("aten::"))
    return frozenset(name.removeprefix("aten::") for name in own if has_kernel(name, key))


def autocast_off() -> AbstractContextManager[Any]:
    """Inside, operators on `cpu` pass autocast by, as they do inside of its own kernels."""
    return torch._C._ExcludeDispatchKeyGuard(_autocast_keys())


@functools.cache
def _autocast_keys() -> Any:
    return torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
