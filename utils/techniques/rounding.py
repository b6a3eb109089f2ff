"""Weights as whole numbers on an even grid, group by group, and what that costs a layer's output.

A group is a run of weights in one row (one output). It has a scale and, unless the grid is symmetric,
a zero point: weight = scale * (code - zero). The error that counts is the output's, and for inputs x
it needs no more than their second moments: |(W - Q) x|^2 summed over the inputs is
trace((W - Q) H (W - Q)^T) with H the sum of x x^T (Frantar et al. 2022, arXiv:2210.17323, equation 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BITS = 16  # as the formats on disk keep it


@dataclass(frozen=True)
class Grid:
    """The numbers that a group's weights may take.

    Attributes:
        scales: fp32 (outputs, 1), the step between neighbours.
        zeros: fp32 (outputs, 1), the code that stands for 0.
        bits: of a code, 2 to 8.
    """

    scales: Tensor
    zeros: Tensor
    bits: int

    @classmethod
    def of(cls, weight: Tensor, bits: int, symmetric: bool = False) -> Grid:
        """The narrowest grid around the weights (outputs, any) of one group, 0 among them.

        Raises:
            ValueError: bits are outside of 2 to 8.
        """
        if not 2 <= bits <= 8:
            raise ValueError(f"bits is {bits!r}; a code takes 2 to 8.")
        top = 2**bits - 1
        low = weight.amin(dim=1, keepdim=True).clamp(max=0)
        high = weight.amax(dim=1, keepdim=True).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales = ((high - low) / top).clamp(min=1e-9)
        zeros = torch.full_like(scales, (top + 1) / 2) if symmetric else torch.round(-low / scales)
        return cls(scales, zeros, bits)

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest code for each weight (outputs, any): uint8, same shape."""
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
        bits: of a code.
        group: inputs that share a scale; the last group of a row may be shorter.
        has_zeros: whether zero points are stored; a symmetric grid needs none.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int
    has_zeros: bool

    def weight(self) -> Tensor:
        """The weight that is stored: fp32 (outputs, inputs)."""
        width = self.codes.shape[1]
        scales, zeros = (
            part.repeat_interleave(self.group, dim=1)[:, :width]
            for part in (self.scales, self.zeros)
        )
        return scales * (self.codes.float() - zeros)

    @property
    def stored_bytes(self) -> float:
        """Bytes of packed codes, scales in 16 bits and zero points in as many bits as a code."""
        each = SCALE_BITS + self.bits * self.has_zeros
        return (self.codes.numel() * self.bits + self.scales.numel() * each) / 8


def groups_of(inputs: int, group: int | None) -> int:
    """How many inputs share a scale: `group`, or the whole row for None.

    Raises:
        ValueError: the group is not positive, or does not divide the row.
    """
    if group is None:
        return inputs
    if group < 1 or inputs % group:
        near = [d for d in (32, 64, 128) if inputs % d == 0] or [inputs]
        raise ValueError(
            f"A group of {group} does not divide rows of {inputs} weights. Take "
            f"{' or '.join(map(str, near))}, or None for one scale a row."
        )
    return group


def round_to_nearest(
    weight: Tensor, bits: int, group: int | None = None, symmetric: bool = False
) -> Rounded:
    """Each weight to its nearest neighbour on its group's grid: no data needed.

    Args:
        weight: (outputs, inputs), floating point.
        bits: 2 to 8.
        group: inputs that share a scale; None for one scale a row.
        symmetric: the same reach on both sides of 0, and no zero points.

    Raises:
        ValueError: bits or group cannot be used.
    """
    return by_columns(weight, bits, group, symmetric, lambda column, codes: None)


def by_columns(
    weight: Tensor,
    bits: int,
    group: int | None,
    symmetric: bool,
    after: Callable[[int, Tensor], None],
) -> Rounded:
    """Round column by column, from the left; `after(column, stored)` may move what is to come.

    The grid of a group is chosen when its first column is reached. `after` gets the column's
    number and the weights (outputs,) that are stored for it; it may change `weight` in place, to
    the right of the column.
    """
    width = weight.shape[1]
    group = groups_of(width, group)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    grids: list[Grid] = []
    for column in range(width):
        if column % group == 0:
            grids.append(Grid.of(weight[:, column : column + group], bits, symmetric))
        here = slice(column, column + 1)
        codes[:, here] = grids[-1].codes(weight[:, here])
        after(column, grids[-1].weight(codes[:, here]).squeeze(1))
    scales, zeros = (torch.cat(parts, dim=1) for parts in zip(*((g.scales, g.zeros) for g in grids), strict=True))
    return Rounded(codes, scales, zeros, bits, group, not symmetric)


def second_moments(inputs: Tensor) -> Tensor:
    """H = sum of x x^T over all rows of (..., inputs): fp32 (inputs, inputs).

    Raises:
        ValueError: there is no row, or one with NaN or infinity.
    """
    rows = inputs.detach().float().flatten(0, -2)
    if not len(rows) or not rows.isfinite().all():
        raise ValueError(
            "The calibration data is empty or not finite: nothing can be learned from it about "
            "which weights matter. Give a few hundred tokens of the text that the model will read."
        )
    return rows.T @ rows


def output_error(weight: Tensor, stored: Tensor, moments: Tensor) -> float:
    """|(W - Q) x| / |W x| over the inputs whose second moments are given."""

    def size(matrix: Tensor) -> float:
        wide = matrix.double()
        return float(((wide @ moments.double()) * wide).sum().clamp(min=0).sqrt())

    return size(weight.detach().float() - stored) / size(weight.detach().float())
