"""Losses that ask a tensor for a truth value, each in another way.

They stand in a file of their own: pytest writes the assertions of test files anew.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def is_bad(y: Tensor) -> Tensor:
    return y.isnan().any()


def raised(y: Tensor) -> Tensor:
    if y.dim() == 2 and not torch.isfinite(y).all():
        raise ValueError("not finite")
    return y.square().mean()


def by_function(y: Tensor) -> Tensor:
    if is_bad(y):
        raise ValueError("not finite")
    return y.square().mean()


def later(y: Tensor) -> Tensor:
    bad = torch.isnan(y).any().item()
    y = y.sin()
    if bad:
        raise ValueError("not finite")
    return y.square().mean()


def asserted(y: Tensor) -> Tensor:
    assert not torch.isnan(y).any() and torch.isfinite(y).all(), "not finite"
    return y.square().mean()


def at_the_end(y: Tensor) -> Tensor:
    if torch.isfinite(y).all():
        return y.square().mean()
    raise ValueError("not finite")


def skipped(y: Tensor) -> Tensor:
    for _ in range(4):
        if torch.rand(()) < 0:  # with data never, as here
            continue
        y = y.sin()
    return y.mean()


def left(y: Tensor) -> Tensor:
    for _ in range(4):
        y = y.sin()
        if y.detach().abs().max() < 1e-9:
            break
    return y.mean()


def returned(y: Tensor) -> Tensor:
    if not (y.detach() > -1e9).all():
        return y.mean()
    return (y.sin() * y.cos()).mean()


def counted(y: Tensor) -> Tensor:
    """Each choice of all that are there, by its number."""
    parts = {f"part {i}": y[:, i] for i in range(8)}
    for row in torch.ones(8).nonzero():
        y = y * parts[f"part {row[0]}"][:, None]
    return y.mean()


def assigned(y: Tensor) -> Tensor:
    mask, y = y > -1e9, y * 1
    y[mask] = y.detach()[mask] * 2
    return y.square().mean()


def distinct(y: Tensor) -> Tensor:
    numbers, inverse = torch.unique(torch.arange(y.numel()), return_inverse=True)
    return (y.flatten()[inverse] * numbers[inverse]).mean()


def heard(y: Tensor) -> Tensor:
    odds = y[:, :32].view(64, 8, 32).log_softmax(-1)
    lengths = torch.full((8,), 64), torch.full((8,), 10)
    return F.ctc_loss(odds, torch.ones(8, 10, dtype=torch.long), *lengths)


CHECKS = (raised, by_function, later, asserted, at_the_end)
WAYS = (skipped, left, returned)
WHOLE = (counted, assigned, distinct, heard)
