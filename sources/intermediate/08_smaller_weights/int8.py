"""Eight bits by hand: a whole number from -127 to 127 for each weight, and outliers kept apart.

Dettmers et al. 2022, LLM.int8(), arXiv:2208.07339: section 2.1 for absmax, section 3.2 for the split.
In models of billions of parameters a few input channels are many times larger than all others. In one
row with them the rest is rounded to nothing, so their columns are multiplied in 16 bits. bitsandbytes
0.50 takes those columns of the weight from its int8 codes (`int8_mixed_scaled_mm`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from utils.checked import check_public

from .weight_only import linears_of

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


def split_product(
    x: Tensor, weight: Tensor, columns: Tensor | None = None, threshold: float = THRESHOLD
) -> Tensor:
    """`int8_product`, with the channels of x that reach the threshold multiplied in full.

    Args:
        x: (rows, inputs).
        weight: (outputs, inputs).
        columns: the weight's columns for those channels, (outputs, inputs). None takes them from the
            weight's int8 codes, as bitsandbytes does, which keeps nothing else; the paper's are
            the weight itself, in 16 bits.
        threshold: an input of this magnitude makes its channel an outlier.
    """
    outliers = (x.abs() >= threshold).any(dim=0)
    kept = from_absmax(*absmax(weight)) if columns is None else columns.float()
    rest = int8_product(x.masked_fill(outliers, 0), weight)
    return rest + x[:, outliers].float() @ kept[:, outliers].T


@contextlib.contextmanager
def multiplied_by(
    product: Callable[[Tensor, Tensor], Tensor], model: nn.Module
) -> Iterator[dict[str, float]]:
    """Inside, all linear layers in the blocks of a model multiply by `product(x, weight)`.

    Yields:
        Relative error of each layer's output by its path, once the layer has been called: the last call's.
    """
    errors: dict[str, float] = {}
    found = linears_of(model.get_submodule("blocks"))
    layers = {f"blocks.{path}": layer for path, layer in found.items()}

    def instead(path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], right: Tensor) -> Tensor:
            rows = args[0].flatten(0, -2)
            found = product(rows, layer.get_parameter("weight")).view_as(right)
            errors[path] = float((found - right).norm() / right.norm())
            return found

        return hook

    hooks = [layer.register_forward_hook(instead(path)) for path, layer in layers.items()]
    try:
        yield errors
    finally:
        for hook in hooks:
            hook.remove()


check_public(globals())
