"""GPTQ by hand: round one column, and let the columns to come make up for its error.

Frantar et al. 2022, arXiv:2210.17323. For a layer y = W x the loss is quadratic in W, with the inputs'
second moments H as its Hessian. Rounding column q by an amount e moves the best choice of all later
columns by -e * U[q, later] / U[q, q], where U is the upper Cholesky factor of H's inverse (section 3.3,
steps 2 and 3). The rows do not meet: all go at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rounding import Grid, Rounded, group_size

DAMPING = 0.01  # of the mean of H's diagonal, as the paper adds


def gptq(
    weight: Tensor, moments: Tensor, bits: int, group: int | None = None, damping: float = DAMPING
) -> Rounded:
    """Round a weight so that the layer's output on the calibration data changes least.

    Args:
        weight: (outputs, inputs); left as it is.
        moments: `second_moments` of the layer's inputs, (inputs, inputs).
        bits: 2 to 8.
        group: inputs that share a scale; None for one scale a row. A group's grid is chosen when
            its first column is reached, from where its weights are by then.
        damping: what is added to the diagonal, as a share of its mean. Without it inputs that are
            sums of others, or fewer inputs than columns, leave H without an inverse.

    Raises:
        ValueError: bits or group cannot be used, or the moments are of another width.
    """
    width = weight.shape[1]
    size = group_size(width, group)
    factor = inverse_factor(moments, width, damping)
    moving = weight.detach().float().clone()
    moving[:, moments.diagonal() == 0] = 0  # an input that was never there: any weight does
    codes, grids = torch.empty(weight.shape, dtype=torch.uint8), []
    for column in range(width):
        if column % size == 0:
            grids.append(Grid.of(moving[:, column : column + size], bits))
        here = slice(column, column + 1)
        codes[:, here] = grids[-1].codes(moving[:, here])
        error = (moving[:, here] - grids[-1].weight(codes[:, here])) / factor[column, column]
        moving[:, column + 1 :] -= error * factor[here, column + 1 :]
    scales, zeros = (
        torch.cat([getattr(g, part) for g in grids], 1) for part in ("scales", "zeros")
    )
    return Rounded(codes, scales, zeros, bits)


def inverse_factor(moments: Tensor, width: int, damping: float = DAMPING) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped H: fp32 (width, width).

    Raises:
        ValueError: the moments are of another width.
    """
    if moments.shape != (width, width):
        raise ValueError(
            f"The layer has {width} inputs, and the moments are {tuple(moments.shape)}: collect "
            "them from the inputs of this very layer."
        )
    wide = moments.double()
    mean = wide.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    damped = wide + torch.diag(damping * mean + mean * (wide.diagonal() == 0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
