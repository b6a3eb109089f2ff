"""A cache of results of operations on simulated tensors, by the operation and its arguments.

A step asks for the same few hundred results again and again, once a layer. What a result looks
like follows from the operation and the looks of its arguments: PyTorch works it out the first
time, and from then on a tensor of these looks is made at a fraction of the cost. (PyTorch's own
cache behind `FakeTensorMode` serves many more cases, and takes several times as long.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from utils.shims.shim import check
from utils.shims.torch_ import storage_key
from utils.shims.torch_cache import (
    SHIMS,
    dispatch_keys,
    fake_device,
    fake_like,
    is_builtin_operator,
    is_usual,
)

Tensors = list[torch.Tensor]
Key = tuple[Any, ...]
_SLICE = torch.ops.aten.slice.Tensor
_META = torch.device("meta")
# Arguments that compare by value. Generators, symbols and tensors with data are not among them.
_VALUES = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip
_SEQUENCES = frozenset({list, tuple, torch.Size})
# Results of these depend on values, or they change the looks of their arguments.
_UNPREDICTABLE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
# Registered from Python, with results by looks alone: PyTorch's own, and four- and eight-bit products.
_LIBRARIES = frozenset({"_c10d_functional", "fsdp", "bitsandbytes"})
_MODE = "fake_mode"  # the attribute of a result that says to which simulation it belongs


class Looks(NamedTuple):
    """How to make one result.

    `of` is the number of the argument that it is (`shape` is None) or whose storage it shares,
    counted among the tensors; None where it has a storage of its own.
    """

    of: int | None
    shape: Sequence[int] | None = None
    stride: Sequence[int] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    attributes: Mapping[str, Any] = MappingProxyType({})


class CachedCall(NamedTuple):
    """What the results of a call follow from: its key, and the tensors among its arguments.

    Slices of one length look alike but for where they begin, `shift` elements from their tensor's
    own beginning: a sharded optimizer cuts each gradient into one slice a rank.
    """

    key: Key
    tensors: Tensors
    shift: int = 0


class CachedResult(NamedTuple):
    """The results of an operation, held in `container` unless it has just one, and its scratch."""

    looks: Sequence[Looks | None]
    container: Callable[[Iterable[Any]], Any] | None
    scratch_bytes: int


Recipes = dict[Key, CachedResult]


class SharedResults:
    """What simulations of alike steps have worked out, for the next of them.

    Results follow from the device, too, whose kernels differ, and from the rank: each has its own.
    """

    def __init__(self) -> None:
        self._recipes: dict[Key, Recipes] = {}

    def recipes(self, *conditions: Hashable) -> Recipes:
        """Those of simulations under the same conditions."""
        return self._recipes.setdefault(conditions, {})


class ResultCache:
    """Recipes by operation and looks of the arguments, for one simulation.

    `recipes` are those of simulations before it; it adds its own.

    Raises:
        MovedError: a private name that it stands on is gone; simulate without it.
    """

    def __init__(self, recipes: Recipes) -> None:
        check(SHIMS)
        self._recipes = recipes
        self.mode: FakeTensorMode | None = None  # whose tensors the results are
        self._is_usual: dict[int, bool] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CachedCall | None:
        """What the results of a call follow from; None if they do not follow from looks alone."""
        if not _is_predictable(func):
            return None
        shift = 0
        if func is _SLICE:
            args, shift = _from_its_beginning(*args)
        tensors: Tensors = []
        parts = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._describe(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._describe((value,), parts, tensors):
                return None
        return CachedCall(tuple(parts), tensors, shift)

    def get(self, call: CachedCall) -> CachedResult | None:
        """The recipe for a call, if its like was seen before and has one."""
        return self._recipes.get(call.key)

    def results(self, found: CachedResult, call: CachedCall) -> Any:
        """The results anew. Call it with PyTorch's dispatch to Python switched off."""
        made = [None if looks is None else _make(looks, call, self.mode) for looks in found.looks]
        return made[0] if found.container is None else found.container(made)

    def learn(self, call: CachedCall, again: CachedCall | None, out: Any, scratch: int) -> None:
        """Keep what a call has given, if it can be made anew; `again` is the call after it."""
        several = type(out) in (list, tuple)
        parts = out if several else [out]
        looks: list[Looks | Literal[False] | None] = [_looks(part, call) for part in parts]
        known = [how for how in looks if how is not False]
        made = [part for part, how in zip(parts, looks, strict=True) if how and how.of is None]
        unchanged = again is not None and again.key == call.key
        if unchanged and len(known) == len(looks) and _own_storages(made):
            container = type(out) if several else None
            self._recipes[call.key] = CachedResult(known, container, scratch)

    def _describe(self, args: Iterable[Any], parts: list[Any], tensors: Tensors) -> bool:
        """Append the looks of arguments; False if one of them has no looks to go by."""
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor:
                keys = dispatch_keys(arg)
                if arg.constant is not None or not self._usual(keys, arg):
                    return False
                tensors.append(arg)
                parts += (keys, arg.dtype, arg.shape, arg.stride(), arg.storage_offset())
                parts.append(fake_device(arg))
            elif kind in _VALUES:
                parts += (kind, arg)
            elif kind in _SEQUENCES:
                parts += (kind, len(arg))
                if not self._describe(arg, parts, tensors):
                    return False
            else:
                return False
        return True

    def _usual(self, keys: int, tensor: FakeTensor) -> bool:
        if keys not in self._is_usual:
            self._is_usual[keys] = is_usual(tensor)
        return self._is_usual[keys] and tensor.dispatch_keys is None


@functools.cache
def _is_predictable(func: Any) -> bool:
    return is_builtin_operator(func, _LIBRARIES) and not any(
        tag in func.tags for tag in _UNPREDICTABLE
    )


def _from_its_beginning(
    tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[tuple[Any, ...], int]:
    """A slice's arguments with its length in place of its bounds, and where it begins."""
    is_plain = type(tensor) is FakeTensor and -tensor.dim() <= dim < tensor.dim() and step > 0
    size = tensor.shape[dim] if is_plain else None
    if (
        any(type(number) not in (int, type(None)) for number in (start, end))
        or type(size) is not int
    ):
        return (tensor, dim, start, end, step), 0
    wanted = range(size)[start:end:step]
    return (tensor, dim, len(wanted), step), wanted.start * tensor.stride(dim)


def _looks(result: Any, call: CachedCall) -> Looks | Literal[False] | None:
    """How to make a result anew; None for none, False if it cannot be done."""
    if result is None:
        return None
    tensors = call.tensors
    for number, tensor in enumerate(tensors):
        if tensor is result:
            return Looks(number)
    if type(result) is not FakeTensor or result.constant is not None or result.requires_grad:
        return False
    if result.layout is not torch.strided or result.is_conj() or result.is_neg():
        return False
    storage = result.untyped_storage()
    key = storage_key(storage)
    sources = [n for n, t in enumerate(tensors) if storage_key(t.untyped_storage()) == key]
    shape, stride, offset = result.shape, result.stride(), int(result.storage_offset())
    attributes = {name: value for name, value in vars(result).items() if name != _MODE}
    if len(sources) > 1:
        return False
    if not sources and (offset or storage.nbytes() != _span_bytes(shape, stride, result.itemsize)):
        return False
    of = sources[0] if sources else None
    return Looks(of, shape, stride, offset - call.shift, result.dtype, attributes)


def _own_storages(tensors: Tensors) -> bool:
    return len({storage_key(t.untyped_storage()) for t in tensors}) == len(tensors)


def _span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes of the storage that `empty_strided` makes."""
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))


def _make(looks: Looks, call: CachedCall, mode: FakeTensorMode | None) -> torch.Tensor:
    of, shape, stride, offset, dtype, attributes = looks
    if of is not None and shape is None:
        return call.tensors[of]
    shape = shape or ()
    if of is None:
        plain = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
    else:
        plain = torch.empty((), dtype=dtype, device=_META)
        plain.set_(call.tensors[of].untyped_storage(), offset + call.shift, shape, stride)
    made = fake_like(plain, FakeTensor, attributes)
    made.__dict__[_MODE] = mode
    return made
