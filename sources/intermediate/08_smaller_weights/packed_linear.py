"""A linear layer that keeps its weight in few bits, and writes it out anew in each forward.

A kernel made for a format unpacks the codes while it multiplies; this layer unpacks first. Its bytes
are those of the format, its speed is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checked import check_public

from .awq import Scaled
from .rounding import InFewBits, Rounded

__all__ = ["PackedLinear", "pack_linears"]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes one after the other without gaps, the highest bit first: uint8 (bytes,).

    Args:
        codes: uint8, any shape, each below 2**bits.
        bits: of a code, 1 to 8.

    Raises:
        ValueError: a code does not fit into so many bits.
    """
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"Code {int(codes.max())} does not fit into {bits} bits.")
    ones = (codes.reshape(-1, 1) >> _places(bits)) & 1
    filled = F.pad(ones.flatten(), (0, -ones.numel() % 8)).view(-1, 8)
    return (filled << _places(8)).sum(dim=1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of `pack_codes`: uint8 (count,)."""
    ones = (packed[:, None] >> _places(8)) & 1
    each = ones.flatten()[: count * bits].view(count, bits)
    return (each << _places(bits)).sum(dim=1).to(torch.uint8)


def _places(bits: int) -> Tensor:
    return torch.arange(bits - 1, -1, -1, dtype=torch.uint8)


class PackedLinear(nn.Module):
    """A linear layer for inference: packed codes, fp16 scales and packed zero points.

    Args:
        made: a weight by `round_to_nearest`, `gptq` or `awq`. AWQ's column scales are kept with
            the layer, which divides its input by them; a server folds them into the norm before.
        bias: (outputs,), or None.

    Raises:
        TypeError: the weight is of another form.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    column_scales: Tensor | None
    bias: Tensor | None

    def __init__(self, made: InFewBits, bias: Tensor | None = None) -> None:
        super().__init__()
        rounded = made.rounded if isinstance(made, Scaled) else made
        if not isinstance(rounded, Rounded):
            raise TypeError(
                f"{type(made).__name__} cannot be packed; take a weight by round_to_nearest, gptq or awq."
            )
        self.bits, self.shape, self.groups = rounded.bits, rounded.codes.shape, rounded.scales.shape
        column_scales = made.column_scales.half() if isinstance(made, Scaled) else None
        self.register_buffer("codes", pack_codes(rounded.codes, self.bits))
        self.register_buffer("scales", rounded.scales.half())
        self.register_buffer("zeros", pack_codes(rounded.zeros.to(torch.uint8), self.bits))
        self.register_buffer("column_scales", column_scales)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        super().train(False)

    def weight(self) -> Tensor:
        """The weight written out, before column scales: fp32 (outputs, inputs)."""
        codes = unpack_codes(self.codes, self.bits, self.shape.numel()).view(self.shape)
        zeros = unpack_codes(self.zeros, self.bits, self.groups.numel()).view(self.groups)
        return Rounded(codes, self.scales.float(), zeros, self.bits).weight()

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the dtype of `x`."""
        if self.column_scales is not None:
            x = x / self.column_scales.to(x.dtype)
        return F.linear(x, self.weight().to(x.dtype), self.bias)

    def train(self, mode: bool = True) -> PackedLinear:
        """Only False. Raises RuntimeError for True: whole numbers have no gradient."""
        if mode:
            raise RuntimeError(
                "This layer holds packed whole numbers, which have no gradient. Call model.eval(), "
                "or train adapters around NF4Linear (lesson 06)."
            )
        return super().train(False)

    def extra_repr(self) -> str:
        outputs, inputs = self.shape
        return f"in_features={inputs}, out_features={outputs}, bits={self.bits}, groups={self.groups[1]}"


def pack_linears(model: nn.Module, weights: Mapping[str, InFewBits]) -> nn.Module:
    """Put a `PackedLinear` in the place of each named linear layer, in place; the model, in eval mode.

    Raises:
        TypeError: a path does not lead to a linear layer, or its weight cannot be packed.
    """
    for path, made in weights.items():
        layer, (parent, _, name) = model.get_submodule(path), path.rpartition(".")
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"{path} is a {type(layer).__name__}, not a linear layer.")
        setattr(model.get_submodule(parent), name, PackedLinear(made, layer.bias))
    return model.eval()


check_public(globals())
