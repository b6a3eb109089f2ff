"""AWQ by hand: before rounding, widen the columns whose inputs are large.

Lin et al. 2023, arXiv:2306.00978, section 3.2: W x = (W diag(s)) (x / s). A column that is multiplied
by s > 1 is rounded s times more finely, as long as its group's reach does not grow. What its input is
divided by folds into the norm or layer before. s is the mean magnitude of each input to a power, and
the power is searched; 0 is plain rounding. Then each group's reach is: a grid that clips the largest
weights has smaller steps for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rounding import SCALE_BITS, Grid, Rounded, group_size, output_error, round_to_nearest

TRIES = 20  # powers from 0 to 0.95, as in the authors' code
REACHES = [1 - step / 20 for step in range(10)]  # of a group's grid: 1 to 0.55


@dataclass(frozen=True)
class Scaled:
    """A weight that was widened, then rounded.

    Attributes:
        rounded: of W diag(s).
        column_scales: s, fp32 (inputs,).
        power: which was best; 0 is plain rounding.
    """

    rounded: Rounded
    column_scales: Tensor
    power: float

    def weight(self) -> Tensor:
        """The weight in effect, the inputs' share taken back: fp32 (outputs, inputs)."""
        return self.rounded.weight() / self.column_scales

    @property
    def stored_bytes(self) -> float:
        """With the scales of its columns, in 16 bits: no other matrix shares them.

        Scales that all readers of a norm share fold into that norm, as in the paper, and take none.
        """
        return self.rounded.stored_bytes + SCALE_BITS / 8 * self.column_scales.numel()


def awq(
    weight: Tensor, moments: Tensor, magnitudes: Tensor, bits: int, group: int | None = None
) -> Scaled:
    """Scale columns by their inputs' magnitude to the best power, then round to nearest.

    Args:
        weight: (outputs, inputs).
        moments: `second_moments` of the layer's inputs.
        magnitudes: mean of |x| of each input, (inputs,).
        bits: 2 to 8.
        group: inputs that share a scale; None for one scale a row.

    Raises:
        ValueError: bits or group cannot be used, or the magnitudes are of another width.
    """
    if magnitudes.shape != (weight.shape[1],):
        raise ValueError(
            f"The layer has {weight.shape[1]} inputs, and the magnitudes are "
            f"{tuple(magnitudes.shape)}: collect them from the inputs of this very layer."
        )
    found = []
    for power in (step / TRIES for step in range(TRIES)):
        scales = column_scales(magnitudes, power)
        rounded = round_to_nearest(weight.detach().float() * scales, bits, group)
        found.append(Scaled(rounded, scales, power))

    def error(tried: Scaled) -> float:
        return output_error(weight, tried.weight(), moments)

    best = min(found, key=error)
    scales = best.column_scales
    widened, seen = weight.detach().float() * scales, moments / torch.outer(scales, scales)
    clipped = Scaled(clipped_to_nearest(widened, seen, bits, group), scales, best.power)
    return min(best, clipped, key=error)


def clipped_to_nearest(
    weight: Tensor, moments: Tensor, bits: int, group: int | None = None
) -> Rounded:
    """`round_to_nearest` on the grid, of ten for each group, that serves the group's inputs best.

    The errors of other groups are left out of the choice, so all groups choose at once.
    """
    outputs, inputs = weight.shape
    size = group_size(inputs, group)
    groups = weight.reshape(-1, size)
    parts = torch.arange(inputs).view(-1, size)
    own = moments[parts[:, :, None], parts[:, None, :]]  # (groups of a row, size, size)
    best = torch.full((len(groups), 1), torch.inf)
    codes, scales, zeros = torch.zeros_like(groups), torch.ones_like(best), torch.zeros_like(best)
    for reach in REACHES:
        grid = Grid.of(reach * groups, bits)
        tried = grid.codes(groups)
        away = (groups - grid.weight(tried)).view(outputs, -1, size)
        error = torch.einsum("ogi,gij,ogj->og", away, own, away).reshape(-1, 1)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, tried, codes)
        scales, zeros = (
            torch.where(better, grid.scales, scales),
            torch.where(better, grid.zeros, zeros),
        )
    shape = (outputs, inputs // size)
    return Rounded(
        codes.to(torch.uint8).view(outputs, inputs), scales.view(shape), zeros.view(shape), bits
    )


def column_scales(magnitudes: Tensor, power: float) -> Tensor:
    """Magnitudes to a power, with 1 in the middle of their range: fp32 (inputs,), numbers of fp16."""
    scales = magnitudes.float().clamp(min=1e-4) ** power
    return (scales / (scales.max() * scales.min()).sqrt()).half().float()
