"""Weights as whole numbers on an even grid, group by group, and what that costs a layer's output.

A group is a run of weights in one row (one output). It has a scale and a zero point:
weight = scale * (code - zero). The error that counts is the output's, and for inputs x it needs no more
than their second moments: |(W - Q) x|^2 summed over the inputs is trace((W - Q) H (W - Q)^T) with H the
sum of x x^T (Frantar et al. 2022, arXiv:2210.17323, equation 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from utils.checked import check_public

__all__ = ["output_error", "round_to_nearest", "second_moments"]

SCALE_BITS = 16  # the type in which formats keep a scale: fp16
SMALLEST_SCALE = 2.0**-20  # below it fp16 has few digits left


class InFewBits(Protocol):
    """What a method makes of a weight."""

    def weight(self) -> Tensor:
        """The values in effect, fp32 (outputs, inputs)."""
        ...

    @property
    def stored_bytes(self) -> float:
        """Bytes of the packed form."""
        ...


@dataclass(frozen=True)
class Grid:
    """The numbers that the weights of some groups may take.

    Attributes:
        scales: fp32 (groups, 1), the step between neighbours; each a number of fp16.
        zeros: fp32 (groups, 1), the code that stands for 0.
        bits: of a code, 2 to 8.
    """

    scales: Tensor
    zeros: Tensor
    bits: int

    @classmethod
    def of(cls, groups: Tensor, bits: int) -> Grid:
        """The narrowest grid around each group (groups, weights), 0 among its numbers.

        Raises:
            ValueError: bits are outside of 2 to 8.
        """
        if bits not in range(2, 9):
            raise ValueError(f"bits is {bits!r}; a code takes 2 to 8.")
        low = groups.amin(dim=1, keepdim=True).clamp(max=0)
        high = groups.amax(dim=1, keepdim=True).clamp(min=0)
        scales = ((high - low) / (2**bits - 1)).clamp(min=SMALLEST_SCALE).half().float()
        zeros = torch.round(-low / scales).clamp(0, 2**bits - 1)
        return cls(scales, zeros, bits)

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest code for each weight (groups, any): uint8, same shape."""
        codes = torch.round(weight / self.scales) + self.zeros
        return codes.clamp(0, 2**self.bits - 1).to(torch.uint8)

    def weight(self, codes: Tensor) -> Tensor:
        """The weights that codes stand for: fp32, same shape."""
        return self.scales * (codes.float() - self.zeros)


@dataclass(frozen=True)
class Rounded:
    """A weight (outputs, inputs) in few bits.

    Attributes:
        codes: uint8 (outputs, inputs).
        scales: fp32 (outputs, groups).
        zeros: fp32 (outputs, groups).
        bits: of a code, and of a zero point.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    def weight(self) -> Tensor:
        """The weight that is stored: fp32 (outputs, inputs)."""
        groups = self.codes.float().view(*self.scales.shape, -1)
        return (self.scales[..., None] * (groups - self.zeros[..., None])).flatten(1)

    @property
    def stored_bytes(self) -> float:
        """Bytes of packed codes, and for each group a scale in 16 bits and a zero point."""
        each = SCALE_BITS + self.bits
        return (self.codes.numel() * self.bits + self.scales.numel() * each) / 8


def group_size(inputs: int, group: int | None) -> int:
    """How many inputs share a scale: `group`, or the whole row for None.

    Raises:
        ValueError: the group is not positive, or does not divide the row.
    """
    if group is None:
        return inputs
    if group < 1 or inputs % group:
        near = [size for size in (32, 64, 128) if inputs % size == 0] or [inputs]
        raise ValueError(
            f"A group of {group} does not divide rows of {inputs} weights. Take "
            f"{' or '.join(map(str, near))}, or None for one scale a row."
        )
    return group


def round_to_nearest(weight: Tensor, bits: int, group: int | None = None) -> Rounded:
    """Each weight to its nearest neighbour on its group's grid: no data needed.

    Args:
        weight: (outputs, inputs), floating point.
        bits: 2 to 8.
        group: inputs that share a scale; None for one scale a row.

    Raises:
        ValueError: bits or group cannot be used.
    """
    outputs, inputs = weight.shape
    groups = weight.detach().float().reshape(-1, group_size(inputs, group))
    grid = Grid.of(groups, bits)
    codes = grid.codes(groups).view(outputs, inputs)
    return Rounded(codes, grid.scales.view(outputs, -1), grid.zeros.view(outputs, -1), bits)


def second_moments(inputs: Tensor) -> Tensor:
    """H = sum of x x^T over all rows of (..., inputs): fp32 (inputs, inputs).

    Raises:
        ValueError: there is no row, or one with NaN or infinity.
    """
    rows = inputs.detach().float().flatten(0, -2)
    if not len(rows) or not rows.isfinite().all():
        raise ValueError(
            "The calibration data is empty or not finite: nothing can be learned from it about "
            "which weights matter. Give a few thousand tokens of the text that the model will read."
        )
    return rows.T @ rows


def output_error(weight: Tensor, stored: Tensor, moments: Tensor) -> float:
    """|(W - Q) x| / |W x| over the inputs whose second moments are given.

    Raises:
        ValueError: the shapes do not go together.
    """
    inputs = weight.shape[-1:]
    if weight.dim() != 2 or stored.shape != weight.shape or moments.shape != (*inputs, *inputs):
        raise ValueError(
            f"weight is {tuple(weight.shape)}, stored {tuple(stored.shape)} and moments "
            f"{tuple(moments.shape)}; give (outputs, inputs) twice, and (inputs, inputs)."
        )

    def size(matrix: Tensor) -> float:
        wide = matrix.double()
        return float(((wide @ moments.double()) * wide).sum().clamp(min=0).sqrt())

    return size(weight.detach().float() - stored) / size(weight.detach().float())


check_public(globals())
