"""Exercise 4's kernels: each rounds to E4M3 in blocks of 32 with a power of two as scale; most are broken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from utils.checked import check_public

__all__ = ["FAULTS", "KERNELS", "evidence_of", "fault_of"]

BLOCK, LARGEST = 32, 448.0
Kernel = Callable[[Tensor], Tensor]


def _sound(x: Tensor) -> Tensor:
    return _in_blocks(x, BLOCK)


def _scale_down(x: Tensor) -> Tensor:
    return _in_blocks(x, BLOCK, up=False)


def _one_scale(x: Tensor) -> Tensor:
    return _in_blocks(x.reshape(1, -1), x.numel()).view_as(x)


def _down_columns(x: Tensor) -> Tensor:
    return _in_blocks(x.T, BLOCK).T


def _toward_zero(x: Tensor) -> Tensor:
    return _in_blocks(x, BLOCK, nearest=False)


def _in_blocks(x: Tensor, block: int, *, up: bool = True, nearest: bool = True) -> Tensor:
    parts = x.float().unflatten(-1, (-1, block))
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    # Down is the MX specification's rule: the power of two below, over that of 448. Then 448 to 512 are cut.
    scale = (largest / LARGEST).log2().ceil().exp2() if up else largest.log2().floor().exp2() / 256
    cut = (parts / scale).clamp(-LARGEST, LARGEST)
    small = cut.to(torch.float8_e4m3fn).float()
    if not nearest:
        exponent = (torch.frexp(cut).exponent - 1).clamp(min=-6)
        step = torch.ldexp(torch.ones_like(cut), exponent - 3)
        small = (cut / step).trunc() * step
    return (small * scale).flatten(-2)


FAULTS: dict[str, Kernel] = {
    "sound": _sound,
    "scale rounded down": _scale_down,
    "one scale for all": _one_scale,
    "blocks down the columns": _down_columns,
    "cut toward zero": _toward_zero,
}
_EVIDENCE = {
    "sound": "each number is at most 6.25% off, whatever stands in other blocks",
    "scale rounded down": "a block's largest number can come back smaller by up to an eighth, others are right",
    "one scale for all": "a huge number in one block changes every other block",
    "blocks down the columns": "a huge number changes others in its column, and none in its row",
    "cut toward zero": "no number ever comes back larger, and the mean error is not zero",
}
_ORDER = ("blocks down the columns", "scale rounded down", "sound", "cut toward zero")


def fault_of(name: str) -> str:
    """What is wrong with a kernel.

    Raises:
        ValueError: no such kernel.
    """
    if name not in (faults := dict(zip("ABCD", _ORDER, strict=True))):
        raise ValueError(f"There is no kernel {name!r}: there are A, B, C and D.")
    return faults[name]


def evidence_of(fault: str) -> str:
    """What one would see with it.

    Raises:
        ValueError: no such fault.
    """
    if fault not in _EVIDENCE:
        raise ValueError(f"There is no fault {fault!r}: there are {', '.join(_EVIDENCE)}.")
    return _EVIDENCE[fault]


def _known(fault: str) -> Kernel:
    kernel = FAULTS[fault]

    def rounded(x: Tensor) -> Tensor:
        """x (rows, columns), both in multiples of 32, to E4M3 and back."""
        if x.dim() != 2 or any(size % BLOCK for size in x.shape):
            raise ValueError(f"x is {tuple(x.shape)}: give two dimensions in multiples of {BLOCK}.")
        if not x.isfinite().all():
            raise ValueError("x holds an infinity or NaN: its block has no scale.")
        return kernel(x)

    return rounded


KERNELS: dict[str, Kernel] = {name: _known(fault_of(name)) for name in "ABCD"}

check_public(globals())
