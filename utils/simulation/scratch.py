"""Memory that kernels take and give back inside one operation, by device.

A simulated operation makes its results only. What real kernels need in between is stated here,
per operation, from the allocator's own record of it or from the kernel's source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from utils.simulation.convolutions import backward_scratch, forward_scratch
from utils.simulation.onednn_lstm import BACKWARD, LAYER, layer_scratch
from utils.simulation.recurrences import CUDNN_RESULTS, cudnn_scratch

# An operation, its arguments, its results, and its arguments by name.
Scratch = Callable[[Any, tuple[Any, ...], Any, Mapping[str, Any]], int]
aten = torch.ops.aten
# fp32 tensors of a parameter's size that bitsandbytes' CPU optimizers hold at their worst moment
# (backends/cpu/ops.py): gradient, states if packed, two for the quotient.
OPTIMIZER_COPIES = {
    "bitsandbytes::optimizer_update_8bit_blockwise": 5,
    "bitsandbytes::optimizer_update_32bit": 3,
}

# Operations by element on tensors of several types. CUDA's kernels convert on their way.
MIXING = frozenset(
    getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
)


def cpu_scratch(
    func: Any, args: tuple[Any, ...], out: Any, kwargs: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Bytes beyond the results at an operation's worst moment on a CPU, where it cannot be asked.

    What can be is in `asked_kernels.py`.
    """
    if func is aten.convolution.default:
        return forward_scratch(args[0], args[1], out, args[3:6])
    if func is aten.convolution_backward.default:
        return backward_scratch(args[0], args[1], args[2], out, args[4:7])
    if func is aten.native_batch_norm_backward.default:
        return _bytes(args[0])  # the incoming gradient once more
    if func in (LAYER, BACKWARD):
        return layer_scratch(func, args)
    if func in MIXING:
        return _converted(args, out)
    if func is aten._unique2.default:
        return _sorted_once(args)
    if func in _REDUCED:
        return _REDUCED[func](args, kwargs)
    if func in _BOTH:
        return _BOTH[func](args, out)
    if func.namespace == "torchvision":
        return _deformed(func, args, out)
    if func.name() in OPTIMIZER_COPIES:
        # A 16-bit parameter gets an fp32 copy as well.
        copies = OPTIMIZER_COPIES[func.name()] + (args[2].element_size() < 4)
        return 4 * args[2].numel() * copies
    return 0


def cuda_scratch(
    func: Any, args: tuple[Any, ...], out: Any, kwargs: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Bytes beyond the results at an operation's worst moment on a CUDA GPU.

    Flash attention's backward accumulates the query's gradient in fp32, with one more fp32 per
    query row, both padded to 128 rows, and the head width to 32; grouped keys and values get
    gradients per query head first (flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd).

    An all-to-all between two dimensions of a shard sends a copy in which the one comes first, and
    copies what arrives to where the other is (torch/csrc/distributed/c10d/Functional.cpp,
    shard_dim_alltoall).
    """
    if func is torch.ops._dtensor.shard_dim_alltoall.default:
        gather_dim, shard_dim = args[1:3]
        return _bytes(args[0]) * ((gather_dim != 0) + (shard_dim != 0))
    if func in CUDNN_RESULTS:
        return cudnn_scratch(func, args, out)
    if func in _REDUCED:
        return _REDUCED[func](args, kwargs)
    if func in _BOTH:
        return _BOTH[func](args, out)
    if func.namespace == "torchvision":
        return _deformed(func, args, out)
    if func is not aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    padded_rows, padded_width = -(-rows // 128) * 128, -(-width // 32) * 32
    accumulated = 4 * batch * heads * padded_rows * (padded_width + 1)
    expanded = 2 * _bytes(key) // key.shape[1] * heads if key.shape[1] != heads else 0
    return accumulated + expanded


def _deformed(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """A deformable convolution's columns, one for each output position of up to 32 images.

    torchvision/csrc/ops/cpu/deform_conv2d_kernel.cpp, and alike in cuda/: `kMaxParallelImgs`.
    """
    if "deform_conv2d" not in func.name():
        return 0
    is_backward = "backward" in func.name()
    inputs, weight = args[1:3] if is_backward else args[:2]
    made = args[0] if is_backward else out
    images = max(n for n in range(1, 33) if inputs.shape[0] % n == 0)
    columns = inputs.shape[1] * weight.shape[2:].numel() * images * made.shape[2:].numel()
    return columns * inputs.element_size() + _bytes(made)


def _sorted_once(args: tuple[Any, ...]) -> int:
    """What `unique` sorts, and where each element came from (native/Unique.cpp, by the allocator)."""
    _, inverse, counts = (*args[1:], *(True, False, False)[len(args) - 1 :])
    each = 8 + 8 * counts + args[0].itemsize if inverse or counts else 16
    return args[0].numel() * each + 8 * counts


def _mask_indices(args: tuple[Any, ...], out: Any) -> int:
    """The indices that a mask becomes: as many as there are values, one for each dimension.

    aten/src/ATen/native/IndexingUtils.h, `expandTensors`; one value alone is filled in by the mask.
    Where values are broadcast, each element of the mask counts.
    """
    indices, values = args[1], args[2]
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if values.numel() == 1 and args[3:] != (True,):
        return 0
    rows = values.shape[0] if values.dim() and values.shape[0] != 1 else 0
    return sum(8 * (rows or mask.numel()) * mask.dim() for mask in masks)


def _as_summed(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """A copy in the type of the result, as of a mask that is counted in 64 bits.

    aten/src/ATen/native/ReduceOpsUtils.h, `make_reduction_from_out_ty`.
    """
    x = args[0]
    return x.numel() * out.itemsize if x.dtype is not out.dtype and not x.is_floating_point() else 0


def _converted(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Copies in the common type of all operands, and of a result that is kept in another.

    aten/src/ATen/TensorIterator.cpp, `TensorIteratorBase::compute_types`, where the device is a CPU.
    """
    operands = [arg for arg in args[:2] if isinstance(arg, torch.Tensor)]
    common = torch.result_type(args[0], args[1])
    parts = [*operands, *([out] if out is args[0] else [])]
    return sum(part.numel() for part in parts if part.dtype is not common) * common.itemsize


def _losses(copies: int) -> Callable[[tuple[Any, ...], Mapping[str, Any]], int]:
    """The losses of all elements before their mean or sum, so many times."""

    def scratch_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        first, second, *rest = args
        reduction = rest[0] if rest else kwargs.get("reduction", 1)
        elements = math.prod(torch.broadcast_shapes(first.shape, second.shape))
        return copies * elements * first.element_size() if reduction else 0

    return scratch_bytes


# The two structured ones hold what checks the shapes as well: native/BinaryOps.cpp and Loss.cpp.
_REDUCED: dict[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], int]] = {
    aten.mse_loss.default: _losses(2),
    aten.smooth_l1_loss.default: _losses(2),
    aten.huber_loss.default: _losses(1),
}


_BOTH: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.index_put_.default: _mask_indices,
    aten.index_put.default: _mask_indices,
    aten.sum.default: _as_summed,
    aten.sum.dim_IntList: _as_summed,
    aten.prod.default: _as_summed,
    aten.prod.dim_int: _as_summed,
    # The odds of each choice, native/Distributions.cpp, `multinomial_out`.
    aten.multinomial.default: lambda args, out: _bytes(args[0]),
    # The same table for the way back, native/LossCTC.cpp, `ctc_loss_backward_cpu_template`.
    aten._ctc_loss_backward.default: lambda args, out: _bytes(args[6]),
    aten._ctc_loss_backward.Tensor: lambda args, out: _bytes(args[6]),
}


def _in_its_losses(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean or sum that stays in the memory of the losses of all elements.

    native/Loss.cpp and cuda/Loss.cu: `loss.resize_as_(loss_reduced).copy_(loss_reduced)`.
    """
    reduction = kwargs.get("reduction", args[-1] if isinstance(args[-1], int) else 1)
    losses = torch.empty_like(args[0])
    return losses.as_strided((), ()) if reduction else losses


REDUCED_RESULTS = {
    aten.binary_cross_entropy.default: _in_its_losses,
    aten.soft_margin_loss.default: _in_its_losses,
}


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
