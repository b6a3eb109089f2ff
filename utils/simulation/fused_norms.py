"""`rms_norm` by CUDA's fused kernel, of which PyTorch has no other form for tensors on a CPU.

aten/src/ATen/native/native_functions.yaml, `_fused_rms_norm`: kernels for CUDA and MPS, elsewhere
it is composed of plain operations, each of which keeps a whole tensor for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten
Tensor = torch.Tensor


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """What CUDA makes and keeps: the result, and one fp32 per row beside input and weight.

    A weight of another type than the input goes through plain operations there, too
    (aten/src/ATen/native/layer_norm.cpp, `rms_norm_symint`). So do DTensors here.
    """
    mixed = weight is not None and weight.dtype is not x.dtype
    if mixed or isinstance(x, DTensor) or isinstance(weight, DTensor):
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    return _Fused.apply(x, weight, len(normalized_shape))  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    """Sizes alone, as simulated tensors hold no numbers.

    Differentiated twice it is CUDA's plain formula: tools/autograd/derivatives.yaml,
    `infinitely_differentiable_native_rms_norm_backward`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.contiguous()  # the kernel reads whole rows; such a copy ends with it
        out = torch.empty_like(rows)
        statistics = torch.promote_types(x.dtype, torch.float32)
        rstd = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=statistics)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_twice(grads[0], x, weight, rstd), None
        wants_x, wants_weight, _ = ctx.needs_input_grad
        of_x = torch.empty_like(x.contiguous()) if wants_x else None
        return of_x, torch.empty_like(weight) if wants_weight else None, None


def _twice(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients from operations that have gradients themselves."""
    dims = [d for d in range(x.dim()) if rstd.shape[d] == 1]
    normed = x * rstd
    scaled = grad if weight is None else grad * weight
    of_x = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    if weight is None:
        return of_x.to(x.dtype), None
    rows = list(range(x.dim() - weight.dim()))
    return of_x.to(x.dtype), (grad * normed).sum(rows).to(weight.dtype)
