"""Memory that kernels take and give back inside one operation, by device.

A simulated operation makes its results only. What real kernels need in between is stated here,
per operation, from the allocator's own record of it or from the kernel's source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Scratch = Callable[[Any, tuple[Any, ...], Any], int]
aten = torch.ops.aten
SMALLEST_BLOCKED_CHANNELS = 4


def cpu_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond the results at an operation's worst moment on a CPU (oneDNN, plain layout).

    oneDNN copies a convolution's operands into blocked layouts and its result back; read off the
    counting allocator for ResNet-50 with AVX-512 kernels, where it holds for every layer.
    """
    if func is aten.convolution.default:
        return _convolution(args[0], args[1], out)
    if func is aten.convolution_backward.default:
        return _convolution_backward(*args[:3], *out[:2])
    if func is aten.native_batch_norm_backward.default:
        return _bytes(args[0])  # the incoming gradient once more
    return 0


def cuda_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond the results at an operation's worst moment on a CUDA GPU.

    Flash attention's backward accumulates the query's gradient in fp32, with one more fp32 per
    query row, both padded to 128 rows, and the head width to 32; grouped keys and values get
    gradients per query head first (flash-attention, csrc/flash_attn/flash_api.cpp, mha_bwd).
    """
    if func is not aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    padded_rows, padded_width = -(-rows // 128) * 128, -(-width // 32) * 32
    accumulated = 4 * batch * heads * padded_rows * (padded_width + 1)
    expanded = 2 * _bytes(key) // key.shape[1] * heads if key.shape[1] != heads else 0
    return accumulated + expanded


def _convolution(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
    return max(_blocked(inputs) + _bytes(weight), _bytes(out))


def _convolution_backward(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    to_inputs: torch.Tensor | None,
    to_weight: torch.Tensor | None,
) -> int:
    """First the inputs' gradient, then the weight's: each from copies, into a copy, and back."""
    go, w, gi, gw = map(_bytes, (gradient, weight, to_inputs, to_weight))
    data = max(go + w + gi, 2 * gi) if gi else 0
    weights = gi + max(go + _blocked(inputs) + gw, 2 * gw) if gw else 0
    return max(0, max(data, weights) - gi - gw)


def _blocked(tensor: torch.Tensor) -> int:
    """The copy in blocked layout; images of three channels are read as they are."""
    return _bytes(tensor) if tensor.shape[1] >= SMALLEST_BLOCKED_CHANNELS else 0


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
