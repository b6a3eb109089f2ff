"""The choices that PyTorch makes on a CUDA GPU, applied to tensors that stay on `cpu`.

They are made where PyTorch makes them, in its dispatcher: at the keys of autograd and autocast, so
that functions, methods, modules and code in C++ all meet them, in backward as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from utils.shims.torch_dispatch import kernels_replaced
from utils.simulation.cuda_autocast import autocast_kernels
from utils.simulation.fused_norms import rms_norm

aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256  # the widest head that flash attention takes
MASK_ALIGNMENT = 8  # elements to which the memory-efficient kernel has masks padded


def cuda_choices(flash: bool) -> AbstractContextManager[None]:
    """Inside, attention kernels, fused kernels and autocast's lists are those of CUDA.

    `flash`: the device has flash attention's kernels, from compute capability 8.0 on.
    """
    table = {(f"aten::{name}", "AutocastCPU"): kernel for name, kernel in autocast_kernels()}
    chosen = choices(flash)
    table |= {(op.name(), "AutogradCPU"): kernel for op, kernel in chosen.items()}
    return kernels_replaced(table)


def choices(flash: bool) -> dict[Any, Callable[..., Any]]:
    """Composite operators, and the function that runs each as on CUDA."""
    return {
        aten.scaled_dot_product_attention.default: partial(attention, flash),
        aten.dropout.default: _dropout,
        aten.rms_norm.default: rms_norm,
        aten.softmax.int: partial(_softmax, aten.softmax.int, aten._softmax.default),
        aten.log_softmax.int: partial(_softmax, aten.log_softmax.int, aten._log_softmax.default),
    }


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """CUDA's fused kernel keeps a mask of one byte an element, CPU's the scaled noise."""
    if train and 0 < p < 1 and tensor.numel():
        return torch.native_dropout(tensor, p, True)[0]
    return aten.dropout.default.decompose(tensor, p, train)


def _softmax(
    composed: Any, kernel: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """From float16 to float32 CUDA's kernel converts on its way (aten/src/ATen/native/SoftMax.cpp,
    `softmax`: "input.is_cuda() && input.scalar_type() == Half && dtype == Float")."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return kernel(tensor, dim, True)
    return composed.decompose(tensor, dim, dtype)


def attention(
    flash: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` by the kernel that CUDA takes.

    Flash attention for 16-bit types without a mask, then the memory-efficient kernel; either
    keeps the output and one fp32 log-sum-exp per query row, never the matrix of scores. What
    neither takes (grouped keys with a mask or in fp32, odd widths, other than four dimensions, rows
    that do not lie in one piece) goes through plain operations
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `can_use_flash_attention` and
    `can_use_mem_efficient_attention`), and so does a mask that is trained, as T5's: an H200's
    allocator counted that step to 7 KB so; the kernel would take 13% less. A boolean mask is copied
    to the query's type first (attention.cpp, `convert_boolean_attn_mask`).
    Shapes: (batch, heads, sequence, head width).
    """
    low, four = query.dtype in _LOW, query.dim() == key.dim() == value.dim() == 4
    if flash and low and four and attn_mask is None and _suits_flash(query, key, value):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    mask = _as_numbers(attn_mask, query.dtype)
    same_heads = four and query.shape[1] == key.shape[1] == value.shape[1]
    fits = query.dtype is not torch.float64 and _aligned_heads(query, value)
    is_trained = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if same_heads and fits and not is_trained and _has_whole_rows(query, key, value, mask):
        return _efficient(query, key, value, mask, dropout_p, is_causal, scale)
    out = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return out[0]


def _suits_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    return len(widths) == 1 and max(widths) <= FLASH_WIDTH


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    if short := -width % 8:
        query, key, value = (F.pad(part, (0, short)) for part in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )
    return out[0][..., :width] if short else out[0]


def _has_whole_rows(*tensors: torch.Tensor | None) -> bool:
    """`check_last_dim_stride_equals_1_dense` of aten/src/ATen/native/transformers/sdp_utils_cpp.h."""
    return all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors)


def _aligned_heads(query: torch.Tensor, value: torch.Tensor) -> bool:
    elements = 8 if query.dtype in _LOW else 4
    return query.shape[-1] % elements == 0 and value.shape[-1] % elements == 0


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    trains = any(part.requires_grad for part in (query, key, value))
    if mask is not None:
        if any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
            last = mask.shape[-1]
            mask = F.pad(mask, (0, MASK_ALIGNMENT - last % MASK_ALIGNMENT))[..., :last]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    out = aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        mask,
        trains and torch.is_grad_enabled(),
        dropout_p,
        is_causal,
        scale=scale,
    )
    return out[0]


def _as_numbers(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as numbers to add: 0 where attention may look, minus infinity elsewhere."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, mask.new_full((), -math.inf, dtype=dtype))


def choose_optimizer_kernels(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """On CUDA an optimizer that was not told otherwise takes its multi-tensor (foreach) kernels.

    torch/optim/optimizer.py, `_default_to_fused_or_foreach`: on CPU, and for DTensors anywhere, it
    loops over the tensors. So does Adafactor everywhere, which never asks (torch/optim/_adafactor.py).
    """
    choosing = (o for o in optimizers if not isinstance(o, torch.optim.Adafactor))
    for group in (group for optimizer in choosing for group in optimizer.param_groups):
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if undecided and not any(isinstance(p, DTensor) for p in group["params"]):
            group["foreach"] = True
