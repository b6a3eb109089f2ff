"""Sums of products in few bits, as an H800's tensor cores keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.checked import check_public

__all__ = ["cut", "in_14_bits"]


def cut(x: Tensor, bits: int) -> Tensor:
    """To so many binary digits, toward zero."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


def in_14_bits(a: Tensor, b: Tensor, promote: int | None = None) -> Tensor:
    """a (m, k) times b (n, k) in fp64, the running sum cut to 14 bits after every 32 products.

    Args:
        a, b: factors, k a multiple of 32.
        promote: after so many products the short sum goes to a wide one and begins anew; None: never.

    Raises:
        ValueError: k is no multiple of 32, or `promote` does not divide it in steps of 32.
    """
    if a.shape[1] % (promote or 32) or (promote or 32) % 32:
        raise ValueError(f"{a.shape[1]} products cannot be added 32 at a time, {promote} a sum.")
    parts = (a[:, None].double() * b[None].double()).unflatten(-1, (-1, 32)).sum(-1)
    total = short = torch.zeros(parts.shape[:2], dtype=torch.float64)
    for count, part in enumerate(parts.unbind(-1), 1):
        short = cut(short + part, 14)
        if promote and 32 * count % promote == 0:
            total, short = total + short, torch.zeros_like(short)
    return total + short


check_public(globals())
