"""Frozen linear layers in four bits (NF4), as QLoRA keeps its base model.

Dettmers et al. 2023, arXiv:2305.14314: blocks of 64 weights share one scale (section 3, "4-bit
NormalFloat"); double quantization keeps these scales in eight bits, 256 of them to one fp32 scale.
A weight takes 4 + 32/64 = 4.5 bits, with double quantization 4 + 8/64 + 32/(64 * 256) = 4.127.

The layers are written over the operations that bitsandbytes registers with PyTorch, so the same
code runs on real tensors and on simulated ones. `nf4.py` has the arithmetic by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.shims.torch_ import with_data
from utils.techniques.bitsandbytes_import import bitsandbytes_library, has_bitsandbytes
from utils.techniques.nf4 import BLOCK, SCALE_BLOCK
from utils.techniques.replace import replace_linears

if has_bitsandbytes():
    bitsandbytes_library()  # a simulation has to know of it before it begins

_ops = torch.ops.bitsandbytes


class NF4Linear(nn.Module):
    """`x @ W.T + b` with W frozen in NF4, unpacked anew in every forward and backward.

    Autograd keeps the packed weight only: the unpacked one is a temporary of 2 bytes a weight,
    and the input is not kept, since W has no gradient.

    The scales are kept as raw bytes, so that `model.to(torch.bfloat16)` does not round them.
    """

    scales: Tensor
    outer_scales: Tensor
    scale_code: Tensor
    scale_mean: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        double_quantization: bool = False,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Quantize a weight.

        Args:
            weight: (outputs, inputs), in fp32, fp16 or bf16.
            bias: (outputs,), kept as it is and frozen.
            double_quantization: keep the scales of blocks in eight bits.
            compute_dtype: what the product is computed in; the result has the input's dtype.

        Raises:
            ValueError: the weight is no matrix of floating-point numbers.
            ModuleNotFoundError: bitsandbytes is not installed.
        """
        super().__init__()
        bitsandbytes_library()
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"NF4 packs a matrix of floating-point weights; this one has shape "
                f"{tuple(weight.shape)} and dtype {weight.dtype}."
            )
        self.out_features, self.in_features = weight.shape
        self.compute_dtype, self.double_quantization = compute_dtype, double_quantization
        packed, scales = _ops.quantize_4bit(weight.detach(), BLOCK, "nf4", torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._keep(scales)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> NF4Linear:
        """Quantize a linear layer; `options` are the constructor's."""
        return cls(linear.weight, linear.bias, **options)

    def _keep(self, scales: Tensor) -> None:
        if not self.double_quantization:
            self.register_buffer("scales", _raw(scales))
            return
        mean = scales.mean()
        code = torch.tensor(_dynamic_code())
        scales, outer = _ops.quantize_blockwise(scales - mean, code, SCALE_BLOCK)
        self.register_buffer("scales", scales)
        for name, part in {"outer_scales": outer, "scale_code": code, "scale_mean": mean}.items():
            self.register_buffer(name, _raw(part))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight (outputs, inputs) as a fresh tensor of `dtype`."""
        shape = (self.out_features, self.in_features)
        return _ops.dequantize_4bit(self.weight, self._scales(), BLOCK, "nf4", shape, dtype)

    def _scales(self) -> Tensor:
        if not self.double_quantization:
            return self.scales.view(torch.float32)
        outer, code, mean = (
            part.view(torch.float32)
            for part in (self.outer_scales, self.scale_code, self.scale_mean)
        )
        centred = _ops.dequantize_blockwise(self.scales, outer, code, SCALE_BLOCK, torch.float32)
        return centred + mean

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the dtype of `x`."""
        return _FrozenProduct.apply(x.to(self.compute_dtype), self).to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, double_quantization={self.double_quantization}"
        )


class _FrozenProduct(torch.autograd.Function):
    """A product whose backward unpacks the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, layer.unpacked(x.dtype), bias)

    # It gets the gradient of the one output; the signature that it overrides takes any number.
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ ctx.layer.unpacked(gradient.dtype), None


def quantize_linears(
    model: nn.Module,
    *,
    skip: Iterable[str] = ("head", "lm_head"),
    double_quantization: bool = False,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """Replace the linear layers of a model by `NF4Linear`, in place, and return it.

    Args:
        model: quantized in place; what is not a linear layer keeps its dtype.
        skip: last parts of the paths of layers that stay as they are; QLoRA leaves the head.

    Raises:
        ValueError: the model has no linear layer to replace.
    """
    pack = functools.partial(
        NF4Linear.from_linear, double_quantization=double_quantization, compute_dtype=compute_dtype
    )
    left = set(skip)
    return replace_linears(
        model, lambda path: path.rpartition(".")[2] not in left, pack, (nn.Linear,)
    )


def _raw(tensor: Tensor) -> Tensor:
    """The same bytes without a floating-point dtype, so that no conversion touches them."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@functools.cache
def _dynamic_code() -> tuple[float, ...]:
    """The 256 values of bitsandbytes' eight-bit type (Dettmers 2016, arXiv:1511.04561)."""
    with with_data():  # a simulation has no values to read
        return tuple(bitsandbytes_library().functional.create_dynamic_map().tolist())
