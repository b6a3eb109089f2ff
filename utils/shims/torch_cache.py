"""What the cache of results stands on; a simulation without it needs none of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from utils.shims.shim import Library, Shim

TORCH = Library("torch", "2.15.0", "utils/shims/torch_cache.py")

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
    TORCH,
    "torch._library.utils:is_builtin",
    "is_builtin_operator",
    "operators of others may do anything",
)
_OVERLOAD = Shim(
    TORCH, "torch._ops:OpOverload", "is_builtin_operator", "only operators have results to keep"
)
_SUBCLASS = Shim(
    TORCH,
    "torch:Tensor._make_subclass",
    "fake_like",
    "the public constructor of fake tensors takes several times as long",
)
_WARN = Shim(
    TORCH,
    "torch._C:_set_warn_deprecated_on_mutable_data_ptr",
    "fake_like",
    "the constructor of fake tensors does so, unless PyTorch is told to raise there",
)
_FAKE_DEVICE = Shim(
    TORCH,
    "torch._subclasses.fake_tensor:FakeTensor.fake_device",
    "fake_device",
    "a fake tensor is on `meta`, and knows which device it stands for",
    announced=True,
)
SHIMS = (_KEYS, _KEY_NAMES, _BUILTIN, _OVERLOAD, _SUBCLASS, _WARN, _FAKE_DEVICE)
_UNUSUAL = (
    "Conjugate",
    "Negative",
    "ZeroTensor",
    "SparseCPU",
    "SparseCsrCPU",
    "SparseMeta",
    "SparseCsrMeta",
    "QuantizedCPU",
    "QuantizedMeta",
    "NestedTensor",
)


# These run for every argument of every operation: through the rows it would be felt. `check` finds
# their names before a simulation begins.


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
    device = attributes.get("_fake_device", attributes.get("fake_device"))  # the latter: torch 2.11
    result = torch.Tensor._make_subclass(
        kind, plain, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_warn_deprecated_on_mutable_data_ptr(result)
    result.__dict__.update(attributes)
    return result
