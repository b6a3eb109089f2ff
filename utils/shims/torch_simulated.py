"""PyTorch on tensors without data: what it would read, put right while a simulation runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_simulated.py")

_APPLY = Shim(
    TORCH,
    "torch.nn:Module._apply",
    "plain_conversion",
    "it swaps tensors in place, which fails on those without data",
    patched=True,
)
_RESIZE = Shim(
    TORCH,
    "torch:UntypedStorage.resize_",
    "noted_resizes",
    "FSDP frees and takes memory by it, and no dispatch mode sees it",
    patched=True,
)
_TRUNCATED = Shim(
    TORCH,
    "torch.nn.init:_no_grad_trunc_normal_",
    "unread_initialization",
    "it looks at the values it drew, to draw again",
    patched=True,
)
_SHAPES = Shim(
    TORCH,
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "apart_from_shapes",
    "DTensor learns shapes by running an operation on whole tensors that are never made",
    patched=True,
)
_DEVICE_INIT = Shim(
    TORCH,
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init",
    "device_asked_once",
    "it is asked in every operation, and with DeepSpeed each answer opens a library",
    patched=True,
)
_DEEPCOPY = Shim(
    TORCH,
    "torch:Tensor.__deepcopy__",
    "copied_without_data",
    "it copies the storage byte by byte, and where there are none it takes the process down",
    patched=True,
)
_FORMAT = Shim(
    TORCH,
    "torch:Tensor.__format__",
    "formatted_by_value",
    "it knows plain tensors alone, and raises a TypeError for one without data",
    patched=True,
)
_LOG = Shim(
    TORCH,
    "torch._subclasses.fake_tensor:log",
    "errors_unlogged",
    "it logs the whole stack of an error that it raises all the same",
)
_RUN_COMPILED = Shim(
    TORCH,
    "torch._dynamo.eval_frame:_callback_from_stance",
    "compiled_as_eager",
    "compiled code passes dispatch modes by; PyTorch falls back to eager with many warnings",
    patched=True,
)
SHIMS = (
    _APPLY,
    _RESIZE,
    _TRUNCATED,
    _SHAPES,
    _DEVICE_INIT,
    _DEEPCOPY,
    _FORMAT,
    _LOG,
)
COMPILER_SHIMS = (_RUN_COMPILED,)  # its module takes seconds to load, and most need none of it


def plain_conversion(
    after: Callable[[nn.Module], None] = lambda module: None,
) -> AbstractContextManager[Any]:
    """Inside, `module.to(...)` and its kin assign converted tensors, which works without data.

    `after` is called with each module whose own tensors were converted.
    """

    def convert(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        for owner in _convert(module, fn, recurse):
            after(owner)
        return module

    return _APPLY.replaced(convert)


def noted_resizes(note: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[Any]:
    """Inside, `note` is called with each storage that has changed its size in place."""
    resize = _RESIZE.get()

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    return _RESIZE.replaced(noted)


def unread_initialization() -> AbstractContextManager[Any]:
    """Inside, `nn.init.trunc_normal_` draws once and looks at nothing."""
    return _TRUNCATED.replaced(_without_reading)


def apart_from_shapes(
    apart: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[Any]:
    """Inside, DTensor works out shapes in a context of its own, `apart()`."""
    work_out = _SHAPES.get()

    def unwatched(*args: Any) -> Any:
        with apart():
            return work_out(*args)

    return _SHAPES.replaced(unwatched)


def device_asked_once() -> AbstractContextManager[Any]:
    """Inside, whether there is a GPU to leave alone is asked once, and not in each operation."""
    mode, name = _DEVICE_INIT.owner()
    return _DEVICE_INIT.replaced(getattr(mode(), name))


@contextlib.contextmanager
def compiled_as_eager(note: Callable[[], None]) -> Iterator[None]:
    """Inside, what `torch.compile` has made runs as the Python that it was made from.

    `note()` is called for each such run, and for each call of `torch.compile`.
    """
    compile_, loaded = torch.compile, "torch._dynamo.eval_frame" in sys.modules

    @functools.wraps(compile_)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        given = args[0] if args else kwargs.get("model")
        return given if given is not None else lambda function: function

    def no_callback(callback: Any) -> Any:
        if callback is not None and callback is not False:
            note()
        return None if callback is None or callable(callback) else callback

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", noted))
        if loaded:
            stack.enter_context(_RUN_COMPILED.replaced(no_callback))
        yield


def copied_without_data() -> AbstractContextManager[Any]:
    """Inside, `copy.deepcopy` clones tensors without data: shape, gradient and attributes."""
    plain = _DEEPCOPY.get()

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if type(tensor) is not FakeTensor or not tensor.is_leaf:
            return plain(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        fresh = tensor.detach().clone(memory_format=torch.preserve_format)
        kept = fresh.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = kept
        if tensor.grad is not None:
            kept.grad = copy.deepcopy(tensor.grad, memo)
        own = {name: value for name, value in vars(tensor).items() if name not in vars(fresh)}
        vars(kept).update(copy.deepcopy(own, memo))
        return kept

    from torch._subclasses.fake_tensor import FakeTensor

    return _DEEPCOPY.replaced(copied)


def formatted_by_value() -> AbstractContextManager[Any]:
    """Inside, `f"{loss:.3f}"` asks a tensor without data for its value, as `.item()` does.

    Without a format a tensor is shown as one without data where nothing tells its value.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException

    plain = _FORMAT.get()

    def formatted(tensor: torch.Tensor, spec: str) -> str:
        if tensor.dim():
            return plain(tensor, spec)
        try:
            return format(tensor.item(), spec)
        except DataDependentOutputException:
            if spec:
                raise
            return plain(tensor, spec)

    return _FORMAT.replaced(formatted)


@contextlib.contextmanager
def errors_unlogged() -> Iterator[None]:
    """Inside, an operation that fails raises its error and writes no stack to the log beside it."""

    def has_no_stack(record: logging.LogRecord) -> bool:
        return not record.exc_info

    log = _LOG.get()
    log.addFilter(has_no_stack)
    try:
        yield
    finally:
        log.removeFilter(has_no_stack)


def _convert(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool
) -> list[nn.Module]:
    """`nn.Module._apply` by plain assignment. A weight that several modules share stays one."""
    converted: dict[int, nn.Parameter] = {}
    owners = list(module.modules()) if recurse else [module]
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    converted[id(parameter)] = _converted(parameter, fn)
                owner._parameters[name] = converted[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = fn(buffer)
    return owners


def _converted(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    with torch.no_grad():
        fresh = fn(parameter)
    if fresh is parameter:
        return parameter
    devices = [getattr(part, "fake_device", part.device) for part in (parameter, fresh)]
    if type(parameter) is type(fresh) and devices[0] == devices[1]:
        parameter.data = fresh  # an optimizer that holds the parameter goes on holding it
        return parameter
    return nn.Parameter(fresh, parameter.requires_grad)


def _without_reading(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """`nn.init.trunc_normal_` redraws until all values lie within (a, b); here there are none."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)
