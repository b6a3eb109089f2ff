"""What PyTorch does in place on tensors with data, and out of place on those without.

Backward writes into memory that nobody else holds: it adds a second gradient to the first
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`), and picks apart what a choice of
elements took together (torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`). It
does neither for subclasses of a tensor, and a tensor without data is one. The difference is a whole
tensor wherever a value is used twice, or is sorted, gathered or indexed.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from utils.shims.shim import check
from utils.shims.torch_ import inside_backward, with_data
from utils.shims.torch_gradients import SHIMS, gradient_node, uses

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
_ADD = aten.add.Tensor
# Operation -> what it is with data, and the beginning of the names of autograd's functions where.
_FROM_ZEROS: dict[Any, tuple[Any, str | tuple[str, ...]]] = {
    aten.index_add.default: (aten.index_add_.default, "IndexSelectBackward"),
    aten.index_put.default: (aten.index_put_.default, "IndexBackward"),
    aten.masked_scatter.default: (aten.masked_scatter_.default, "MaskedSelectBackward"),
    aten.put.default: (aten.put_.default, "TakeBackward"),
    aten.scatter_add.default: (
        aten.scatter_add_.default,
        ("GatherBackward", "CummaxBackward", "CumminBackward"),
    ),
    aten.masked_fill.Scalar: (aten.masked_fill_.Scalar, ("Maximum", "Minimum", "Fmax", "Fmin")),
    aten.scatter.src: (aten.scatter_.src, ""),  # of the largest, the sorted, the median
}
# Steps of one expression, each in the memory of the one before (native/Loss.cpp).
_CHAINED = {aten.sub.Tensor: aten.sub_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
CANDIDATES = frozenset({_ADD, *_FROM_ZEROS, *_CHAINED})


class InPlace:
    """Tells the operations of a backward that are done in place, one after another."""

    def __init__(self) -> None:
        self._alone = _alone()
        self.asked = 0  # the id of the tensor whose device was asked for just before, as engines do

    def operation(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """An operation of `CANDIDATES` and its arguments, as they are with data."""
        if not inside_backward() or torch.is_grad_enabled():
            is_next = func is _ADD and _is_bias(*args) and _held(args[0]) == self._alone
            return (aten.add_.Tensor, args) if is_next else (func, args)
        if func in _CHAINED:
            if not gradient_node().startswith("BinaryCrossEntropyWithLogitsBackward"):
                return func, args
            # The weights of the positive, which backward keeps, are held twice more.
            is_next = func is aten.sub.Tensor or _held(args[0])[1] <= self._alone[1] + 1
            return (_CHAINED[func], args) if is_next else (func, args)
        if func is not _ADD:
            in_place, where = _FROM_ZEROS[func]
            is_there = gradient_node().startswith(where) and gradient_node()[-1].isdigit()
            return (in_place, args) if is_there else (func, args)
        if self.asked != id(args[1]) or len(args) != 2 or not _alike(*args):
            return func, args
        if _held(args[0]) == self._alone and _is_dense(args[0]):
            return aten.add_.Tensor, args
        if _held(args[1]) == self._alone and _is_dense(args[1]):
            return aten.add_.Tensor, (args[1], args[0])
        return func, args


def _is_bias(first: Any, second: Any = None, *more: Any) -> bool:
    """Whether it may be a bias or a mask that is added to a product; then C++ alone holds that.

    aten/src/ATen/native/Linear.cpp, `linear` of rows that do not follow each other, RNN.cpp, and
    transformers/attention.cpp, `_scaled_dot_product_attention_math`.
    """
    if more or not _alike(first, second) or not 0 < second.dim() <= first.dim():
        return False
    # Of equal sizes they may be two parts of a loss, as in `hinge_embedding_loss`, added out of place.
    return second.dim() < first.dim() or second.numel() < first.numel()


def _alike(first: Any, second: Any) -> bool:
    return type(first) is FakeTensor and type(second) is FakeTensor and first.dtype is second.dtype


def _held(tensor: torch.Tensor) -> tuple[int, ...]:
    """How many hold a tensor: in Python, in C++, and its storage."""
    return sys.getrefcount(tensor), *uses(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one stretch of memory, each in a place of its own."""
    if tensor.layout is not torch.strided:
        return False
    filled = 1
    sizes = [(stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    for stride, n in sorted(sizes):
        if stride != filled:
            return False
        filled *= n
    return True


class _Looking(TorchDispatchMode):
    """Notes how a gradient is held that nobody but autograd's engine does."""

    found: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and inside_backward():
            self.found = self._seen(args)
        return func(*args, **(kwargs or {}))

    def _seen(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        return _held(args[0])


@functools.cache
def _alone() -> tuple[int, ...]:
    """How a tensor is held by autograd's engine alone, in this version of PyTorch."""
    check(SHIMS)
    with with_data(), torch.enable_grad(), FakeTensorMode(), _Looking() as looking:
        x = torch.ones(2, requires_grad=True) * 2
        (x.sin() + x.cos()).sum().backward()
    return looking.found
