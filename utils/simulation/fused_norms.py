"""`rms_norm` by CUDA's fused kernel, of which PyTorch has no other form for tensors on a CPU.

aten/src/ATen/native/native_functions.yaml, `_fused_rms_norm`: kernels for CUDA and MPS, elsewhere
it is composed of plain operations, each of which keeps a whole tensor for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

aten = torch.ops.aten
Tensor = torch.Tensor


def rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """What CUDA makes and keeps: the result, and one fp32 per row beside input and weight.

    A weight of another type than the input goes through plain operations there, too
    (aten/src/ATen/native/layer_norm.cpp, `rms_norm_symint`), and so does a DTensor whose rows are
    not whole on each rank, which must be gathered first.
    """
    mixed = weight is not None and weight.dtype is not x.dtype
    if mixed or not _has_whole_rows(x, weight, len(normalized_shape)):
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)
    return _Fused.apply(x, weight, len(normalized_shape))  # pyright: ignore[reportReturnType]


def _has_whole_rows(x: Tensor, weight: Tensor | None, dims: int) -> bool:
    if not isinstance(x, DTensor):
        return not isinstance(weight, DTensor)
    whole_weight = not isinstance(weight, DTensor) or weight.placements == (Replicate(),) * len(
        weight.placements
    )
    first = x.dim() - dims
    return whole_weight and all(
        isinstance(p, Replicate) or (isinstance(p, Shard) and p.dim % x.dim() < first)
        for p in x.placements
    )


class _Fused(torch.autograd.Function):
    """Sizes alone, as simulated tensors hold no numbers.

    Differentiated twice it is CUDA's plain formula: tools/autograd/derivatives.yaml,
    `infinitely_differentiable_native_rms_norm_backward`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        local = _local(x)
        rows = local.contiguous()  # the kernel reads whole rows; such a copy ends with it
        out = torch.empty_like(rows)
        statistics = torch.promote_types(x.dtype, torch.float32)
        rstd = local.new_empty((*local.shape[:-dims], *[1] * dims), dtype=statistics)
        ctx.save_for_backward(x, weight, rstd)
        return _placed(out, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_twice(grads[0], x, weight, rstd), None
        if isinstance(x, DTensor) and isinstance(grads[0], DTensor):
            grads[0].redistribute(x.device_mesh, x.placements)  # the kernel takes rows of both
        wants_x, wants_weight, _ = ctx.needs_input_grad
        of_x = _placed(torch.empty_like(_local(x).contiguous()), x) if wants_x else None
        return of_x, _of_weight(weight, x) if wants_weight else None, None


def _of_weight(weight: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight: of a rank's rows alone where others have the other rows."""
    made = torch.empty_like(_local(weight))
    if not isinstance(x, DTensor):
        return made
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in x.placements]
    return DTensor.from_local(made, x.device_mesh, placements, run_check=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(local: Tensor, like: Tensor) -> Tensor:
    """A tensor of this rank as the part of a DTensor, where `like` is one."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip


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
