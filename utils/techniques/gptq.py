"""GPTQ by hand: round one column, and let the columns to come make up for its error.

Frantar et al. 2022, arXiv:2210.17323. For a layer y = W x the loss is quadratic in W, with the inputs'
second moments H as its Hessian. Rounding column q by an amount e moves the best choice of all later
columns by -e * U[q, later] / U[q, q], where U is the upper Cholesky factor of H's inverse (section 3.3,
steps 2 and 3). The rows do not meet: all go at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.techniques.rounding import Rounded, by_columns

DAMPING = 0.01  # of the mean of H's diagonal, as the paper adds


def gptq(
    weight: Tensor,
    moments: Tensor,
    bits: int,
    group: int | None = None,
    symmetric: bool = False,
    damping: float = DAMPING,
) -> Rounded:
    """Round a weight so that the layer's output on the calibration data changes least.

    Args:
        weight: (outputs, inputs); left as it is.
        moments: `second_moments` of the layer's inputs, (inputs, inputs).
        bits: 2 to 8.
        group: inputs that share a scale; None for one scale a row.
        symmetric: no zero points.
        damping: what is added to the diagonal, as a share of its mean. Without it inputs that are
            sums of others, or fewer inputs than columns, leave H without an inverse.

    Raises:
        ValueError: bits or group cannot be used, or the moments are of another width.
    """
    width = weight.shape[1]
    if moments.shape != (width, width):
        raise ValueError(
            f"The layer has {width} inputs, and the moments are {tuple(moments.shape)}: collect "
            "them from the inputs of this very layer."
        )
    moving = weight.detach().float().clone()
    dead = moments.diagonal() == 0  # an input that was never there: any weight does
    moving[:, dead] = 0
    factor = inverse_factor(moments, damping)

    def carry_on(column: int, stored: Tensor) -> None:
        error = (moving[:, column] - stored) / factor[column, column]
        moving[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])

    return by_columns(moving, bits, group, symmetric, carry_on)


def inverse_factor(moments: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped H: (inputs, inputs), fp32."""
    damped = moments.double()
    diagonal = damped.diagonal()
    mean = float(diagonal.mean()) or 1.0
    damped = damped + torch.diag(damping * mean + (diagonal == 0) * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
