"""Eight bits by hand: a whole number from -127 to 127 for each weight, and outliers kept apart.

Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339: section 2.1 for absmax, section 3.2 for the split.
In models of billions of parameters a few input channels are many times larger than all others. In one
row with them the rest is rounded to nothing, so their columns are multiplied in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from utils.checked import check_public

__all__ = ["Int8Weight"]

LEVELS = 127
THRESHOLD = 6.0  # an input of this magnitude makes its channel an outlier, as in the paper


@dataclass(frozen=True)
class Int8Weight:
    """A weight (outputs, inputs) by `absmax`, in the format of bitsandbytes and torchao.

    Attributes:
        codes: int8 (outputs, inputs).
        scales: fp32 (outputs,), the largest magnitude of each row.
    """

    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Round a weight (outputs, inputs)."""
        return cls(*absmax(weight.detach()))

    def weight(self) -> Tensor:
        """The weight that is stored: fp32 (outputs, inputs)."""
        return from_absmax(self.codes, self.scales)

    @property
    def stored_bytes(self) -> float:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def absmax(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 (rows, width) and scales fp32 (rows,): each row over its largest magnitude."""
    scales = rows.float().abs().amax(dim=1)
    codes = torch.round(rows.float() * (LEVELS / scales.clamp(min=1e-30))[:, None])
    return codes.to(torch.int8), scales


def from_absmax(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes and scales stand for: fp32 (rows, width)."""
    return codes.float() * (scales / LEVELS)[:, None]


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with both in eight bits: (rows, inputs) and (outputs, inputs) -> fp32 (rows, outputs).

    The sums are whole numbers; only then are they scaled, by the row of x and the row of W.
    """
    (x_codes, x_scales), (w_codes, w_scales) = absmax(x), absmax(weight)
    sums = x_codes.int() @ w_codes.int().T
    return sums * torch.outer(x_scales / LEVELS, w_scales / LEVELS)


def split_product(x: Tensor, weight: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """`int8_product`, with the channels of x that reach the threshold multiplied as they are."""
    outliers = (x.abs() >= threshold).any(dim=0)
    rest = int8_product(x[:, ~outliers], weight[:, ~outliers])
    return rest + x[:, outliers].float() @ weight[:, outliers].float().T


check_public(globals())
