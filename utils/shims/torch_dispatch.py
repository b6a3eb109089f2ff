"""PyTorch's dispatcher and its modes: kernels replaced, modes passed by, what an operator says of itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_dispatch.py")

_BACKWARD = Shim(
    TORCH,
    "torch.autograd:_engine_run_backward",
    "also_in_backward",
    "PyTorch switches a mode off while it handles `backward()`",
    patched=True,
)
_MODES = Shim(
    TORCH,
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    "active_modes",
    "a simulation inside another must be refused",
)
_PYTHON_OFF = Shim(
    TORCH,
    "torch._C:_DisableTorchDispatch",
    "python_dispatch_off",
    "results that are made anew must not come back to the watcher",
)
_FUNCTION_OFF = Shim(
    TORCH,
    "torch._C:DisableTorchFunction",
    "torch_function_off",
    "working out a result must not choose kernels a second time",
)
_BELOW = Shim(
    TORCH,
    "torch._C:_AutoDispatchBelowAutograd",
    "below_autograd",
    "a kernel that replaces autograd's must not come back to itself",
)
_LIBRARY = Shim(
    TORCH,
    "torch.library:_scoped_library",
    "kernels_replaced",
    "a public library of kernels stays until the process ends",
)
_TENSOR_DEVICE = Shim(
    TORCH,
    "torch._subclasses.fake_tensor:FakeTensor.device",
    "devices_answered",
    "tensors without data answer it themselves, past every function mode",
    patched=True,
)
_SCHEMA = Shim(
    TORCH,
    "torch:ops.aten.add.Tensor._schema",
    "writes_arguments",
    "an operator says nowhere else whether it writes to its arguments",
)
SHIMS = (
    _BACKWARD,
    _MODES,
    _PYTHON_OFF,
    _FUNCTION_OFF,
    _BELOW,
    _LIBRARY,
    _TENSOR_DEVICE,
    _SCHEMA,
)


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
def kernels_replaced(table: Mapping[tuple[str, str], Callable[..., Any]]) -> Iterator[None]:
    """Inside, operators such as "aten::softmax.int" have other kernels, by operator and key."""
    with _LIBRARY.get()("aten", "IMPL") as library:
        with warnings.catch_warnings():  # it warns of each kernel that another one hides
            warnings.simplefilter("ignore")
            for (name, key), kernel in table.items():
                library.impl(name.removeprefix("aten::"), kernel, key)
        yield


def below_autograd() -> AbstractContextManager[Any]:
    """Inside, operators run without autograd's part of them."""
    return _BELOW.get()()


def devices_answered(answer: Callable[[Any, torch.device], Any]) -> AbstractContextManager[Any]:
    """Inside, `x.device` is `answer(x, device)` for tensors without data."""
    device = _TENSOR_DEVICE.get().fget
    return _TENSOR_DEVICE.replaced(property(lambda tensor: answer(tensor, device(tensor))))


def writes_arguments(func: Any) -> bool:
    """Whether an operator changes one of its arguments."""
    return func._schema.is_mutable


def active_modes() -> list[Any]:
    """The dispatch modes that are in force now."""
    return _MODES.get()()


def python_dispatch_off() -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which operators do not come to dispatch modes."""
    return _PYTHON_OFF.get()


def torch_function_off() -> Callable[[], AbstractContextManager[Any]]:
    """What makes a context in which functions do not come to function modes."""
    return _FUNCTION_OFF.get()
