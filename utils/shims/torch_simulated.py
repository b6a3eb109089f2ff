"""PyTorch on tensors without data: what it would read, put right while a simulation runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_simulated.py")

_APPLY = Shim(
    TORCH, "torch.nn:Module._apply", "plain_conversion",
    "it swaps tensors in place, which fails on those without data", patched=True,
)  # fmt: skip
_RESIZE = Shim(
    TORCH, "torch:UntypedStorage.resize_", "noted_resizes",
    "FSDP frees and takes memory by it, and no dispatch mode sees it", patched=True,
)  # fmt: skip
_TRUNCATED = Shim(
    TORCH, "torch.nn.init:_no_grad_trunc_normal_", "unread_initialization",
    "it looks at the values it drew, to draw again", patched=True,
)  # fmt: skip
_SHAPES = Shim(
    TORCH,
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "apart_from_shapes",
    "DTensor learns shapes by running an operation on whole tensors that are never made", patched=True,
)  # fmt: skip
_DEVICE_INIT = Shim(
    TORCH, "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", "device_asked_once",
    "it is asked in every operation, and with DeepSpeed each answer opens a library", patched=True,
)  # fmt: skip
_BACKWARD = Shim(
    TORCH, "torch.autograd:_engine_run_backward", "also_in_backward",
    "PyTorch switches a mode off while it handles `backward()`", patched=True,
)  # fmt: skip
_LOG = Shim(
    TORCH, "torch._subclasses.fake_tensor:log", "errors_unlogged",
    "it logs the whole stack of an error that it raises all the same",
)  # fmt: skip
_MODES = Shim(
    TORCH, "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "active_modes",
    "a simulation inside another must be refused",
)  # fmt: skip
_PYTHON_OFF = Shim(
    TORCH, "torch._C:_DisableTorchDispatch", "python_dispatch_off",
    "results that are made anew must not come back to the watcher",
)  # fmt: skip
_FUNCTION_OFF = Shim(
    TORCH, "torch._C:DisableTorchFunction", "torch_function_off",
    "working out a result must not choose kernels a second time",
)  # fmt: skip
SHIMS = (
    _APPLY, _RESIZE, _TRUNCATED, _SHAPES, _DEVICE_INIT, _BACKWARD, _LOG, _MODES, _PYTHON_OFF,
    _FUNCTION_OFF,
)  # fmt: skip

# What the cache of results stands on; a simulation without it needs none of these.
_KEYS = Shim(
    TORCH,
    "torch._C:_dispatch_keys",
    "dispatch_keys",
    "results follow from the keys of the arguments",
)
_KEY_NAMES = Shim(
    TORCH,
    "torch._C:DispatchKey",
    "is_usual",
    "conjugates, quantized and sparse tensors are left out",
)
_BUILTIN = Shim(
    TORCH, "torch._library.utils:is_builtin", "is_builtin_operator",
    "operators of others may do anything",
)  # fmt: skip
_OVERLOAD = Shim(
    TORCH, "torch._ops:OpOverload", "is_builtin_operator", "only operators have results to keep"
)
_SUBCLASS = Shim(
    TORCH, "torch:Tensor._make_subclass", "fake_like",
    "the public constructor of fake tensors takes several times as long",
)  # fmt: skip
_THROW = Shim(
    TORCH, "torch._C:_set_throw_on_mutable_data_ptr", "fake_like",
    "the constructor of fake tensors does so",
)  # fmt: skip
_FAKE_DEVICE = Shim(
    TORCH, "torch._subclasses.fake_tensor:FakeTensor.fake_device", "fake_device",
    "a fake tensor is on `meta`, and knows which device it stands for",
)  # fmt: skip
CACHE_SHIMS = (_KEYS, _KEY_NAMES, _BUILTIN, _OVERLOAD, _SUBCLASS, _THROW, _FAKE_DEVICE)

_UNUSUAL = (
    "Conjugate", "Negative", "ZeroTensor", "SparseCPU", "SparseCsrCPU", "SparseMeta",
    "SparseCsrMeta", "QuantizedCPU", "QuantizedMeta", "NestedTensor",
)  # fmt: skip


def plain_conversion() -> AbstractContextManager[Any]:
    """Inside, `module.to(...)` and its kin assign converted tensors, which works without data."""
    return _APPLY.replaced(_convert)


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
def also_in_backward(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, a `TorchFunctionMode` is in force, and while a backward recomputes as well."""
    run = _BACKWARD.get()

    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    with mode, _BACKWARD.replaced(run_with_mode):
        yield


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


def active_modes() -> list[Any]:
    """The dispatch modes that are in force now."""
    return _MODES.get()()


def python_dispatch_off() -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which operators do not come to dispatch modes."""
    return _PYTHON_OFF.get()


def torch_function_off() -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which functions do not come to function modes."""
    return _FUNCTION_OFF.get()


# The rest runs for every argument of every operation: through the rows it would be felt. `check`
# finds their names before a simulation begins.


def dispatch_keys(tensor: torch.Tensor) -> int:
    """The set of dispatch keys of a tensor, as a number."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def is_usual(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and plain: no conjugate, no zero, sparse or quantized one."""
    found, names = torch._C._dispatch_keys(tensor), torch._C.DispatchKey
    return not any(found.has(getattr(names, name)) for name in _UNUSUAL)


def is_builtin_operator(func: Any, more_namespaces: frozenset[str]) -> bool:
    """Whether it is an operator of PyTorch's own, or of these namespaces."""
    if not isinstance(func, _OVERLOAD.get()):
        return False
    return _BUILTIN.get()(func) or func.namespace in more_namespaces


def fake_device(tensor: Any) -> torch.device:
    """The device that a fake tensor stands for."""
    return tensor.fake_device


def fake_like(plain: torch.Tensor, kind: type[Any], attributes: Mapping[str, Any]) -> Any:
    """A fake tensor around a tensor on `meta`, with another fake tensor's attributes.

    `FakeTensor`'s own constructor does the same, and checks its arguments on the way.
    """
    result = torch.Tensor._make_subclass(
        kind, plain, False, dispatch_device=True,
        device_for_backend_keys=attributes["_fake_device"],
    )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(result)
    result.__dict__.update(attributes)
    return result


def _convert(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """`nn.Module._apply` by plain assignment. A weight that several modules share stays one."""
    converted: dict[int, nn.Parameter] = {}
    for owner in module.modules() if recurse else [module]:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in converted:
                    converted[id(parameter)] = _converted(parameter, fn)
                owner._parameters[name] = converted[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = fn(buffer)
    return module


def _converted(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Parameter:
    with torch.no_grad():
        fresh = fn(parameter)
    return parameter if fresh is parameter else nn.Parameter(fresh, parameter.requires_grad)


def _without_reading(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """`nn.init.trunc_normal_` redraws until all values lie within (a, b); here there are none."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)
