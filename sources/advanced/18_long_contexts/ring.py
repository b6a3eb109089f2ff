"""Attention whose sequence lies on several ranks: around a ring, by an exchange of heads, or gathered.

As the lesson builds it by hand, for the models of its lab, tests and records: queries, keys and values
are those of this rank's tokens, and so is the result. `places` says which tokens these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.checked import check_public

from .pieces import attend_piece, piece_gradients
from .refusals import check_heads, check_length

__all__ = ["merge", "places", "ring_attention", "ulysses_attention"]

Rows = tuple[slice, slice, bool]


def places(length: int, rank: int, ranks: int, zigzag: bool = True) -> Tensor:
    """Positions (length / ranks,) of a sequence that a rank holds, in rising order.

    Args:
        length: tokens of the sequence.
        rank, ranks: whose, and of how many.
        zigzag: a piece from the front and its mirror from the back; else two neighbours.

    Raises:
        ValueError: the sequence does not divide.
    """
    check_length(length, ranks)
    pieces = torch.arange(length).chunk(2 * ranks)
    own = (rank, 2 * ranks - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)
    return torch.cat([pieces[number] for number in own])


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, zigzag: bool = True, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Causal attention (B, A, S / ranks, D) to the keys of all ranks, which go around a ring.

    Partial sums, and gradients on their way, are in fp32 or finer, as in PyTorch's ring.

    Args:
        q: (B, A, S / ranks, D), this rank's.
        k, v: (B, K, S / ranks, D), this rank's.
        zigzag: how `places` laid the tokens out.
        group: ranks that share the sequence; None for all.

    Raises:
        ValueError: called outside of ranks.
    """
    if not dist.is_initialized():
        raise ValueError(
            "ring_attention() runs on ranks: call it in a function given to run_ranks()."
        )
    return _Ring.apply(q, k, v, zigzag, group)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The same by all-to-all: each rank has all tokens of some heads while it attends.

    Args:
        q, k, v: as a ring has them; tokens lie in order, `places(..., zigzag=False)`.
        mask: (S, S), True where a query sees a key, of the whole sequence; None for causal.
        group: ranks that share the heads; None for all.
        attend: takes the place of attention to the group's tokens: a ring around several groups.

    Raises:
        ValueError: heads do not divide over the ranks; on every rank, before anything is sent.
    """
    ranks = dist.get_world_size(group)
    check_heads(q.shape[1], k.shape[1], ranks)
    copies = max(1, ranks // k.shape[1])
    k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
    q, k, v = (_Exchange.apply(x, 1, 2, group) for x in (q, k, v))
    out = attend(q, k, v) if attend else F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )  # fmt: skip
    return _Exchange.apply(out, 2, 1, group)


def shares(rank: int, source: int, length: int, zigzag: bool) -> Rows | None:
    """Which queries of `rank` see which keys of `source`, and whether the diagonal cuts them; None: none."""
    everything, half = slice(0, length), length // 2
    if source == rank:
        return everything, everything, True
    if not zigzag:
        return (everything, everything, False) if source < rank else None
    if source < rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, zigzag: bool, group: Any) -> Tensor:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        sums, kv = torch.promote_types(q.dtype, torch.float32), torch.stack((k, v))
        out, lse = torch.zeros_like(q, dtype=sums), q.new_full(q.shape[:3], -torch.inf, dtype=sums)
        for step in range(ranks):
            coming = _pass_on(kv, group) if step < ranks - 1 else None
            if seen := shares(rank, (rank - step) % ranks, q.shape[2], zigzag):
                rows, columns, causal = seen
                seen_k, seen_v = kv[..., columns, :].unbind()
                part, its = attend_piece(q[:, :, rows], seen_k, seen_v, causal)
                merge(out[:, :, rows], lse[:, :, rows], part, its)
            kv = _arrived(coming) if coming else kv
        whole = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, whole, lse)
        ctx.zigzag, ctx.group = zigzag, group
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        kv, sums = torch.stack((k, v)), torch.promote_types(q.dtype, torch.float32)
        to_q, to_kv = (torch.zeros_like(x, dtype=sums) for x in (q, kv))
        home: tuple[Tensor, list[Any]] = to_kv, []
        for step in range(ranks):
            coming = _pass_on(kv, ctx.group) if step < ranks - 1 else None
            part: tuple[Tensor, ...] = ()
            if seen := shares(rank, (rank - step) % ranks, q.shape[2], ctx.zigzag):
                rows, columns, causal = seen
                gradient, own, done, logs = (x[:, :, rows] for x in (gradients[0], q, out, lse))
                seen_k, seen_v = kv[..., columns, :].unbind()
                part = piece_gradients(gradient, own, seen_k, seen_v, done, logs, causal)
                to_q[:, :, rows] += part[0]
            to_kv = _arrived(home)  # sent a round ago: it came while this one was computed
            if seen:
                to_kv[..., seen[1], :] += torch.stack(part[1:])
            home = _pass_on(to_kv, ctx.group)  # after the last of n moves it is home
            kv = _arrived(coming) if coming else kv
        to_k, to_v = _arrived(home).to(k.dtype)
        return to_q.to(q.dtype), to_k, to_v, None, None


def _pass_on(x: Tensor, group: Any) -> tuple[Tensor, list[Any]]:
    """Send to the next rank and receive from the one before; give what will have arrived."""
    rank, ranks, new = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(x)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    if group is not None:
        after, before = (dist.get_global_rank(group, place) for place in (after, before))
    sent = dist.isend(x.contiguous(), after, group=group)
    return new, [sent, dist.irecv(new, before, group=group)]


def _arrived(coming: tuple[Tensor, list[Any]]) -> Tensor:
    for work in coming[1]:
        if work is not None:
            work.wait()
    return coming[0]


def merge(out: Tensor, lse: Tensor, part: Tensor, its: Tensor) -> None:
    """Add a piece's outputs to those so far, each weighted by its sum of exponentials, in place.

    Args:
        out, lse: (B, A, S, D) and (B, A, S), so far; of fresh ones `lse` is minus infinity.
        part, its: the piece's.

    Raises:
        ValueError: the shapes are not those.
    """
    wanted = {"lse": (lse, out.shape[:-1]), "part": (part, out.shape), "its": (its, lse.shape)}
    for name, (given, shape) in wanted.items():
        if given.shape != shape:
            raise ValueError(
                f"merge: {name} is {tuple(given.shape)}; beside this out it is {tuple(shape)}."
            )
    both = torch.logaddexp(lse, its)
    old, new = ((x - both).exp()[..., None].to(out.dtype) for x in (lse, its))
    out.mul_(old).add_(part * new)
    lse.copy_(both)


class _Exchange(torch.autograd.Function):
    """Cut one dimension over the ranks, and join another: all-to-all, whose backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: Any) -> Tensor:
        ctx.dims, ctx.group = (cut, join), group
        return _exchanged(x, cut, join, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cut, join = ctx.dims
        return _exchanged(gradients[0], join, cut, ctx.group), None, None, None


def _exchanged(x: Tensor, cut: int, join: int, group: Any) -> Tensor:
    mine = torch.stack(x.chunk(dist.get_world_size(group), cut))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return torch.cat(theirs.unbind(), join)


check_public(globals())
