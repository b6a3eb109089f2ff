"""Texts of unequal length on two ranks, and the gradient that a rule of averaging gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.ranks import run_ranks

__all__ = ["TOKENS", "errors_of", "summed_loss", "texts"]

TOKENS = [[3, 11], [4, 2]]  # of each rank's two micro-batches
Text = tuple[Tensor, Tensor]


def texts(rank: int) -> list[Text]:
    """Inputs (tokens, 6), fp64, and targets (tokens,) of each of a rank's micro-batches."""
    torch.manual_seed(rank)
    return [(torch.randn(n, 6).double(), torch.randint(5, (n,))) for n in TOKENS[rank]]


def summed_loss(model: nn.Module, text: Text) -> Tensor:
    """The sum of the losses of a text's tokens, a scalar."""
    return F.cross_entropy(model(text[0]), text[1], reduction="sum")


def errors_of(*rules: Callable[[nn.Module, list[Text]], object]) -> dict[str, float]:
    """By each rule's name, how far its gradient on two ranks is from that of all tokens at once.

    The norm of the difference over that of the right gradient.

    Args:
        rules: each is called on every rank with its DDP model and its texts; it calls backward.
    """
    right = _model()
    every = [text for rank in range(len(TOKENS)) for text in texts(rank)]
    (
        torch.stack([summed_loss(right, text) for text in every]).sum() / sum(map(sum, TOKENS))
    ).backward()
    wanted = _gradient(right)
    found = run_ranks(_on_rank, len(TOKENS), rules)[0]
    return {name: float((each - wanted).norm() / wanted.norm()) for name, each in found.items()}


def _on_rank(rules: Sequence[Callable[[nn.Module, list[Text]], object]]) -> dict[str, Tensor]:
    found = {}
    for rule in rules:
        model = _model()
        rule(DistributedDataParallel(model), texts(dist.get_rank()))
        found[rule.__name__] = _gradient(model)
    return found


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 5).double()


def _gradient(model: nn.Linear) -> Tensor:
    assert model.weight.grad is not None, "The rule has called no backward."
    return model.weight.grad
