"""Tensor and sequence parallelism by hand: Megatron's layers as autograd functions.

Column- and row-parallel matrices, and the pair f and g between them, are those of Shoeybi et al.
2019 (arXiv:1909.08053), section 3. With a sequence split f and g become the all-gather and
reduce-scatter of Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.2: a column-parallel
matrix keeps its own part of the sequence, and gathers the rest once more in backward.

`tensor.py` does the same by DTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from utils.checked import check_public
from utils.parallel.tensor_shares import check_sequence

__all__ = ["SharedGradients", "Split", "vocabulary_cross_entropy"]


@dataclass(frozen=True)
class Split:
    """Ranks that share each matrix.

    Attributes:
        group: Their process group; None for all ranks.
        sequence_dim: Along which dimension they also share what lies between the matrices; None
            for not at all (then `gather` does nothing, and `reduce` is an all-reduce).
    """

    group: dist.ProcessGroup | None = None
    sequence_dim: int | None = None

    @property
    def ranks(self) -> int:
        """How many."""
        return dist.get_world_size(self.group)

    @property
    def place(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self.group)

    def gather(self, x: Tensor) -> Tensor:
        """The whole sequence, from every rank's part of it; g's backward."""
        if self.sequence_dim is None:
            return x
        part = x.movedim(self.sequence_dim, 0).contiguous()
        whole = part.new_empty((self.ranks * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole.movedim(0, self.sequence_dim)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks: all of it, or this rank's part of the sequence; f's backward.

        Raises:
            ValueError: the sequence does not divide over the ranks.
        """
        if self.sequence_dim is None:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
            return x
        whole = x.movedim(self.sequence_dim, 0).contiguous()
        check_sequence(whole.shape[0], self.ranks)
        part = whole.new_empty((whole.shape[0] // self.ranks, *whole.shape[1:]))
        dist.reduce_scatter_tensor(part, whole, group=self.group)
        return part.movedim(0, self.sequence_dim)


class _Columns(torch.autograd.Function):
    """x @ W.T for several W that share x, each split by its outputs. Keeps x as it came: a part."""

    @staticmethod
    def forward(ctx: Any, split: Split, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.split = split
        ctx.save_for_backward(x, *weights)
        whole = split.gather(x)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        pairs = list(zip(gradients, weights, strict=True))
        to_x = ctx.split.reduce(functools.reduce(torch.add, [g @ w for g, w in pairs]))
        whole = ctx.split.gather(x).flatten(0, -2)
        return None, to_x, *(g.flatten(0, -2).T @ whole for g in gradients)


class _Rows(torch.autograd.Function):
    """x @ W.T with W split by its inputs: every rank has a part of each sum."""

    @staticmethod
    def forward(ctx: Any, split: Split, x: Tensor, weight: Tensor) -> Tensor:
        ctx.split = split
        ctx.save_for_backward(x, weight)
        return split.reduce(F.linear(x, weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = ctx.split.gather(gradients[0])
        return None, gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class _Sum(torch.autograd.Function):
    """Megatron's g by itself: the sum over ranks forward, its gather backward."""

    @staticmethod
    def forward(ctx: Any, split: Split, x: Tensor) -> Tensor:
        ctx.split = split
        return split.reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.split.gather(gradients[0])


def columns(linears: Sequence[nn.Linear], split: Split, x: Tensor) -> tuple[Tensor, ...]:
    """Outputs (..., O / ranks) of layers that hold some of their outputs, for one input.

    Args:
        linears: layers that read the same input, such as query, key and value: it is gathered once
            for all of them, and their gradients to it are summed before they are sent.
        split: over which ranks.
        x: (..., I), or this rank's part of the sequence of it.
    """
    found = _Columns.apply(split, x, *(linear.weight for linear in linears))
    biases = [linear.bias for linear in linears]
    return tuple(y if b is None else y + b for y, b in zip(found, biases, strict=True))


def one_column(linear: nn.Linear, split: Split, x: Tensor) -> Tensor:
    """`columns` of a single layer."""
    return columns([linear], split, x)[0]


def rows(linear: nn.Linear, split: Split, x: Tensor) -> Tensor:
    """Outputs (..., O), or a part of the sequence of them, of a layer that holds some inputs.

    The bias is added once, after the sum.
    """
    y = _Rows.apply(split, x, linear.weight)
    return y if linear.bias is None else y + linear.bias


def word_vectors(embed: nn.Embedding, split: Split, tokens: Tensor) -> Tensor:
    """Vectors of tokens (B, S) from a table that holds some words: zeros for the rest, then a sum."""
    held = embed.weight.shape[0]
    place = tokens - split.place * held
    elsewhere = (place < 0) | (place >= held)
    vectors = F.embedding(place.masked_fill(elsewhere, 0), embed.weight)
    return _Sum.apply(split, vectors.masked_fill(elsewhere[..., None], 0.0))


class _CrossEntropy(torch.autograd.Function):
    """Keeps this rank's probabilities alone; sends three numbers a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> Tensor:
        held = logits.shape[-1]
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[..., None]
        place = targets - dist.get_rank(group) * held
        elsewhere = (place < 0) | (place >= held)
        place = place.masked_fill(elsewhere, 0)[..., None]
        wanted = shifted.gather(-1, place)[..., 0].masked_fill(elsewhere, 0.0)
        shares = shifted.exp_()
        both = torch.stack((shares.sum(-1), wanted))
        dist.all_reduce(both, group=group)
        shares /= both[0][..., None]
        ctx.save_for_backward(shares, place, elsewhere)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shares, place, elsewhere = ctx.saved_tensors
        found = shares.scatter_add(-1, place, (elsewhere.to(shares.dtype) - 1)[..., None])
        return found * gradients[0][..., None], None, None


def vocabulary_cross_entropy(
    logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Cross-entropy of each token, from logits that never meet on one rank.

    Args:
        logits: (..., V / ranks), of this rank's words; float32 or wider, as sums are in its type.
        targets: (...), words of the whole vocabulary, the same on every rank.
        group: the ranks that share the vocabulary; None for all.

    Raises:
        RuntimeError: there are no ranks that could share it.
    """
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "vocabulary_cross_entropy runs on ranks that share a vocabulary, and this process has no "
            "process group. Call it inside run_ranks or a script that torchrun starts."
        )
    return _CrossEntropy.apply(logits, targets, group)


@dataclass
class SharedGradients:
    """Parameters that several ranks hold whole while each sees a part of their gradient.

    Under sequence parallelism: norms, and biases that are added after a sum. And the copies of a
    key-value head that stands on several ranks.
    """

    over: list[tuple[dist.ProcessGroup | None, list[nn.Parameter]]] = field(default_factory=list)

    def add_up(self) -> None:
        """Sum these gradients over their ranks, in one call a group: after the last backward."""
        for group, parameters in self.over:
            grads = [p.grad for p in parameters if p.grad is not None]
            if not grads:
                continue
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))


check_public(globals())
