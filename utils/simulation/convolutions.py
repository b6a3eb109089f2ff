"""Memory that a convolution on a CPU takes and gives back, by the kernel that PyTorch chooses.

Read off the counting allocator for the layers of ResNet-50 (AVX-512, one thread).
"""

from __future__ import annotations

from typing import Any

import torch

SMALLEST_BLOCKED_CHANNELS = 4  # oneDNN reads images of three channels as they are
SMALLEST_ONEDNN_BATCH = 16


def forward_scratch(
    inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, geometry: tuple[Any, ...]
) -> int:
    """Bytes beyond the result. `geometry` is (stride, padding, dilation)."""
    if not onednn(inputs, weight, geometry):
        return _columns(inputs, weight, out, geometry)
    return max(_blocked(inputs) + _bytes(weight), _bytes(out))


def backward_scratch(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    results: tuple[torch.Tensor | None, ...],
    geometry: tuple[Any, ...],
) -> int:
    """Bytes beyond the results, the gradients of inputs and weight.

    oneDNN makes first the inputs' gradient, then the weight's: each from copies in blocked
    layout, into such a copy, and back. The weight's gradient adds up in fp32.
    """
    if not onednn(inputs, weight, geometry):
        return _columns(inputs, weight, gradient, geometry)
    go, w, gi, gw = map(_bytes, (gradient, weight, *results[:2]))
    sums = weight.numel() * 4 if weight.element_size() < 4 else 0
    data = max(go + w + gi, 2 * gi) if gi else 0
    weights = gi + max(go + _blocked(inputs) + gw + sums, 2 * gw) if gw else 0
    return max(0, max(data, weights) - gi - gw)


def onednn(inputs: torch.Tensor, weight: torch.Tensor, geometry: tuple[Any, ...]) -> bool:
    """Whether oneDNN runs it; else PyTorch's own kernel does, by columns.

    aten/src/ATen/native/Convolution.cpp, `ConvParams::use_mkldnn`: 16-bit types where the
    machine has instructions for them; fp32 but for pointwise convolutions of small batches
    on one thread.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if inputs.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if inputs.dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    stride, _, dilation = geometry
    return (
        max(*stride, *dilation) > 1
        or inputs.shape[0] >= SMALLEST_ONEDNN_BATCH
        or max(weight.shape[2:]) > 1
        or torch.get_num_threads() > 1
    )


def _columns(
    inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, geometry: tuple[Any, ...]
) -> int:
    """The input unfolded to a column per output position; pointwise it already is one.

    aten/src/ATen/native/ConvolutionMM2d.cpp, `compute_columns2d`.
    """
    stride, padding, _ = geometry
    if max(*weight.shape[2:], *stride) == 1 and not any(padding):
        return 0
    positions = out.shape[2:].numel()
    return inputs.shape[0] * weight.shape[1:].numel() * positions * inputs.element_size()


def _blocked(tensor: torch.Tensor) -> int:
    return _bytes(tensor) if tensor.shape[1] >= SMALLEST_BLOCKED_CHANNELS else 0


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
