"""The choices that PyTorch makes on a CUDA GPU, applied to tensors that stay on `cpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from utils.shims.torch_simulated import also_in_backward

# CUDA's autocast runs these in fp32, CPU's does not: docs.pytorch.org/docs/stable/amp.html,
# "CUDA Ops that can autocast to float32". The ones that models of the course call.
FLOAT32_FUNCTIONS = {
    F.softmax, F.log_softmax, F.layer_norm, F.group_norm, F.cross_entropy, F.nll_loss,
    F.mse_loss, F.l1_loss, F.kl_div, F.normalize, F.rms_norm, torch.softmax, torch.log_softmax, torch.exp,
    torch.log, torch.pow, torch.sum, torch.prod, torch.cumsum, torch.norm, torch.rsqrt,
}  # fmt: skip
_CHOSEN = FLOAT32_FUNCTIONS | {F.scaled_dot_product_attention, F.dropout, F.rms_norm}


class CudaChoices(TorchFunctionMode):
    """Attention kernels and autocast lists as on CUDA; `flash` from compute capability 8.0 on."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self._flash = flash

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHOSEN:  # most are attributes of tensors: answer at once
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attention(self._flash, *args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.rms_norm and not torch.is_autocast_enabled("cpu"):
            return _rms_norm(*args, **kwargs)
        if func in FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _up, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_choices(flash: bool) -> Iterator[None]:
    """`CudaChoices` in force, in backward too.

    PyTorch switches a mode off while it handles a call to `backward()`, and what a checkpoint
    recomputes in there must choose as the forward did.
    """
    with also_in_backward(CudaChoices(flash)):
        yield


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """CUDA's fused kernel keeps a mask of one byte an element, CPU's the scaled noise."""
    return torch.native_dropout(tensor, p, training)[0] if training and p > 0 else tensor


def _rms_norm(
    tensor: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """CUDA's fused kernel keeps one fp32 per row; the composed form keeps whole tensors."""
    return torch.ops.aten._fused_rms_norm(tensor, normalized_shape, weight, eps)[0]


def _up(tensor: torch.Tensor) -> torch.Tensor:
    low = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if low else tensor


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

    Flash attention for 16-bit types without a mask, else the memory-efficient kernel; either
    keeps the output and one fp32 log-sum-exp per query row, never the matrix of scores.
    Shapes: (batch, heads, sequence, head width).
    """
    if torch.is_autocast_enabled("cpu"):
        to = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(to), key.to(to), value.to(to)
    if flash and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
        return out[0]
    if key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    needs_lse = query.requires_grad or key.requires_grad or value.requires_grad
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_lse, dropout_p, is_causal, scale=scale
    )
    return out[0]


def choose_optimizer_kernel(optimizer: torch.optim.Optimizer | None) -> None:
    """On CUDA an optimizer that was not told otherwise takes its multi-tensor (foreach) kernels.

    torch/optim/optimizer.py, `_default_to_fused_or_foreach`: on CPU, and for DTensors anywhere, it
    loops over the tensors.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        undecided = "foreach" in group and group["foreach"] is None and not group.get("fused")
        if undecided and not any(isinstance(p, DTensor) for p in group["params"]):
            group["foreach"] = True
