"""Values that follow from numbers in the program: lengths, grids, rates of layers.

`torch.linspace(0, 0.1, 12).tolist()` needs no data of a model's. Small tensors that are made from
numbers alone are worked out with data beside the simulation, as long as nothing changes them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from utils.shims.torch_ import storage_key, with_data
from utils.shims.torch_dispatch import writes_arguments

LARGEST = 1024  # elements
aten = torch.ops.aten
_WRITES, _RECEIVES, _FROM_NUMBERS, _UNKNOWN, _PLAIN = range(5)  # kinds of operations
_MAKERS = frozenset(
    {
        "aten::arange",
        "aten::linspace",
        "aten::full",
        "aten::zeros",
        "aten::ones",
        "aten::scalar_tensor",
        "aten::lift_fresh",
        "aten::lift_fresh_copy",
    }
)


class KnownValues:
    """Whole storages with data, by the key of the storage without."""

    def __init__(self) -> None:
        self._flat: dict[int, torch.Tensor] = {}

    def learn(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Work out a result that is small, if all that it follows from is known.

        It is asked after every operation, so what rules most of them out comes first.
        """
        kind = _kind(func)
        if kind == _WRITES:
            if self._flat:
                self.forget(args)
        elif kind == _RECEIVES:
            self.forget(args)
            _forget_constants(args)
        elif kind == _FROM_NUMBERS or (kind == _PLAIN and self._flat and type(out) is FakeTensor):
            if type(out) is FakeTensor and out.numel() <= LARGEST:
                self._learn(func, args, kwargs, out)

    def _learn(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if out.fake_device.type == "meta" or storage_key(out.untyped_storage()) in self._flat:
            return  # the program's own tensors without data; a view
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if (inputs or _kind(func) == _FROM_NUMBERS) and all(map(self.knows, inputs)):
            self.keep(out, self.worked_out(func, args, kwargs))

    def keep(self, out: torch.Tensor, real: torch.Tensor) -> None:
        """Know from now on what `out` holds."""
        with with_data():
            flat = torch.empty(out.untyped_storage().nbytes() // out.itemsize, dtype=out.dtype)
            flat.as_strided(out.shape, out.stride(), int(out.storage_offset())).copy_(real)
        self._flat[storage_key(out.untyped_storage())] = flat

    def forget(self, args: Any) -> None:
        """What an operation writes to is known no more; of tensors among others in lists, too."""
        for arg in args:
            for x in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(x, FakeTensor):
                    self._flat.pop(storage_key(x.untyped_storage()), None)

    def died(self, key: int) -> None:
        """A storage is gone."""
        self._flat.pop(key, None)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known; those of one with data always are."""
        if not isinstance(tensor, FakeTensor):
            return tensor.device.type == "cpu" and tensor.numel() <= LARGEST
        if tensor.requires_grad:
            return False  # training changes it
        flat = self._flat.get(storage_key(tensor.untyped_storage()))
        return flat is not None and flat.dtype is tensor.dtype

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """A known tensor with data."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        flat = self._flat[storage_key(tensor.untyped_storage())]
        with with_data():
            return flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def worked_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an operation on known tensors, with data."""
        args, kwargs = tree_map_only(torch.Tensor, self.real, (args, kwargs))
        with with_data(), torch.no_grad():
            return func(*args, **kwargs)

    def all_known(self, args: Any, kwargs: Any) -> bool:
        """Whether every tensor among the arguments is known."""
        leaves: Iterator[Any] = iter(tree_leaves((args, kwargs)))
        return all(self.knows(x) for x in leaves if isinstance(x, torch.Tensor))


def _forget_constants(args: Any) -> None:
    """PyTorch, too, takes what it made from numbers for unchanged by a collective."""
    for x in tree_leaves(args):
        if isinstance(x, FakeTensor):
            x.constant = None


@functools.cache
def _kind(func: Any) -> int:
    if func.namespace == "c10d":  # these do not say that they write
        return _UNKNOWN if func.name() == "c10d::send" else _RECEIVES
    if writes_arguments(func):
        return _WRITES
    if func.namespace == "_c10d_functional":
        return _UNKNOWN  # what other ranks send
    if func.name().partition(".")[0] in _MAKERS:
        return _FROM_NUMBERS
    return _UNKNOWN if torch.Tag.nondeterministic_seeded in func.tags else _PLAIN
