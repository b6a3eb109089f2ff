"""Four-bit NormalFloat by hand: what `NF4Linear` leaves to bitsandbytes, in readable PyTorch.

Dettmers et al. 2023, QLoRA, arXiv:2305.14314: section 2 for blocks that share a scale, section 3
and equation 4 for the sixteen values and for double quantization. Slow and plain; the results are
those of bitsandbytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a scale of their own

# The outermost quantile: halfway between that of 16 and that of 15 equal shares of a normal
# distribution, half a share from the end. bitsandbytes (create_normal_map) writes it as 0.9677083.
OUTERMOST = 1 - (1 / 32 + 1 / 30) / 2


def nf4_levels() -> Tensor:
    """The 16 values of NF4, rising from -1 to 1, fp32: quantiles of a normal distribution.

    Eight lie above zero and seven below, so that zero itself is one of them.
    """
    above = torch.special.ndtri(_shares(8))
    below = -torch.special.ndtri(_shares(7))
    levels = torch.cat([above, below, torch.zeros(1, dtype=torch.float64)]).sort().values
    return (levels / levels.max()).float()


def _shares(count: int) -> Tensor:
    """`count` evenly spaced probabilities from the outermost down towards one half, without it."""
    return torch.linspace(OUTERMOST, 0.5, count + 1, dtype=torch.float64)[:-1]


def dynamic_levels() -> Tensor:
    """The 256 values of the eight-bit type for scales, rising from about -1 to 1, fp32.

    Dettmers 2016, arXiv:1511.04561, section 2: seven decades; each has twice as many values as
    the decade below it, so that large numbers are told apart more finely.
    """
    magnitudes = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        magnitudes.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    positive = torch.cat(magnitudes)
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """For each value the number of the nearest of the rising `levels`: uint8, same shape."""
    midpoints = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(values, midpoints).to(torch.uint8)


def quantize_blocks(values: Tensor, levels: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 and scales fp32: each block is divided by its largest magnitude, then rounded.

    Args:
        values: any shape, floating point; read row by row.
        levels: rising, from -1 to 1.
        block: how many values share a scale; the last block may be shorter.

    Returns:
        Codes of shape (values,) and scales of shape (blocks,).
    """
    flat = values.detach().float().reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = padded.abs().amax(dim=1)
    codes = nearest(padded * (1 / scales.clamp(min=1e-38))[:, None], levels)
    return codes.reshape(-1)[: len(flat)], scales


def dequantize_blocks(codes: Tensor, scales: Tensor, levels: Tensor, block: int) -> Tensor:
    """The values that codes and scales stand for: fp32 (values,)."""
    each = scales.repeat_interleave(block)[: len(codes)]
    return levels[codes.long()] * each


@dataclass(frozen=True)
class DoubleQuantized:
    """Scales in eight bits: `levels[codes] * outer_scales + mean`.

    Attributes:
        codes: uint8 (scales,).
        outer_scales: fp32, one per 256 scales.
        mean: fp32 scalar, taken off first: scales are all positive, the levels are symmetric.
    """

    codes: Tensor
    outer_scales: Tensor
    mean: Tensor

    @classmethod
    def of(cls, scales: Tensor) -> DoubleQuantized:
        """Quantize the scales of blocks."""
        mean = scales.mean()
        return cls(*quantize_blocks(scales - mean, dynamic_levels(), SCALE_BLOCK), mean)

    def scales(self) -> Tensor:
        """The scales that are stored, fp32 (scales,)."""
        return self.mean + dequantize_blocks(
            self.codes, self.outer_scales, dynamic_levels(), SCALE_BLOCK
        )

    @property
    def nbytes(self) -> int:
        """What is stored, without the table of levels."""
        return sum(part.nbytes for part in (self.codes, self.outer_scales, self.mean))


def pack(codes: Tensor) -> Tensor:
    """Two four-bit codes in each byte, the first in the upper half: uint8 (codes / 2, rounded up)."""
    even = torch.nn.functional.pad(codes, (0, len(codes) % 2))
    return (even[::2] << 4) | even[1::2]


def unpack(packed: Tensor) -> Tensor:
    """The four-bit codes of `pack`, uint8 (2 * bytes,)."""
    return torch.stack([packed >> 4, packed & 0xF], dim=1).reshape(-1)


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes and scales of a weight, in NF4: 4.5 bits a weight."""
    codes, scales = quantize_blocks(weight, nf4_levels(), BLOCK)
    return pack(codes), scales


def dequantize_nf4(packed: Tensor, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weight that packed codes and scales stand for: fp32, of `shape`.

    Raises:
        ValueError: the codes are no bytes, or not as many as the shape has.
    """
    count = torch.Size(shape).numel()
    if packed.dtype is not torch.uint8 or packed.numel() != -(-count // 2):
        raise ValueError(
            f"packed is {packed.numel()} of {packed.dtype}; for the shape {tuple(shape)} it holds "
            f"{-(-count // 2)} of torch.uint8, two codes each."
        )
    if scales.numel() != -(-count // BLOCK):
        raise ValueError(
            f"scales is {scales.numel()} numbers; {count} weights have one for each {BLOCK}."
        )
    codes = unpack(packed.reshape(-1))[:count]
    return dequantize_blocks(codes, scales, nf4_levels(), BLOCK).view(shape)


@dataclass(frozen=True)
class Nf4Weight:
    """A weight (outputs, inputs) in NF4, with plain fp32 scales.

    Attributes:
        packed: uint8, two codes a byte.
        scales: fp32, one for each 64 weights.
        shape: of the weight.
    """

    packed: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor) -> Nf4Weight:
        """Round a weight."""
        return cls(*quantize_nf4(weight), tuple(weight.shape))

    def weight(self) -> Tensor:
        """The weight that is stored: fp32, of its shape."""
        return dequantize_nf4(self.packed, self.scales, self.shape)

    @property
    def stored_bytes(self) -> float:
        """Bytes of codes and scales."""
        return self.packed.nbytes + self.scales.nbytes
