"""Attention over ranks beside one process: how far apart, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.catalog.rules import above_zero
from utils.checked import check_public
from utils.parallel.context import gathered_attention
from utils.parallel.dims import ParallelDims
from utils.parallel.mesh import device_mesh
from utils.traffic.counter import traffic

from .pieces import attend_piece, piece_gradients
from .ring import merge

__all__ = ["Apart", "apart", "gathered", "gradient_error", "merged_error", "sent_bytes"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Apart(NamedTuple):
    """What one rank found.

    Attributes:
        gap: the largest distance of an output or a gradient from that of one process.
        relative: the output's and the gradients' error in the mean, as a part of what is right: the largest.
        put_in: bytes that it put into collectives and messages, by kind, forward and backward.
    """

    gap: float
    relative: float
    put_in: dict[str, int]


def apart(
    attention: Attention,
    places: Callable[[int], Tensor],
    query_heads: int,
    kv_heads: int,
    length: int,
    width: int,
    dtype: torch.dtype = torch.float64,
) -> Apart:
    """On every rank: causal attention of its tokens, forward and backward, beside one process in fp64.

    Args:
        attention: of this rank's queries, keys and values (1, heads, length / ranks, width).
        places: gives the positions that this rank holds, of a length.
        query_heads, kv_heads, length, width: A, K, S and D.
        dtype: of the attention on ranks, and of what both are given.

    Raises:
        ValueError: a rank's positions are none of the length's.
    """
    torch.manual_seed(0)
    heads, own = (query_heads, kv_heads, kv_heads, query_heads), places(length)
    inside = isinstance(own, Tensor) and own.numel() and 0 <= own.min() <= own.max() < length
    if not inside:
        raise ValueError(f"places({length}) gives no positions, or some outside 0 to {length - 1}.")
    drawn = (torch.randn(1, n, length, width, dtype=torch.float64) for n in heads)
    q, k, v, pull = (x.to(dtype).double() for x in drawn)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(
        whole[0], whole[1], whole[2], is_causal=True, enable_gqa=True
    )
    wanted.backward(pull)
    mine = [x[:, :, own].to(dtype).requires_grad_() for x in (q, k, v)]
    with traffic() as sent:
        out = attention(*mine)
        out.backward(pull[:, :, own].to(dtype))
    errors = [_error(out, wanted[:, :, own])]
    for found, right in zip(mine, whole, strict=True):
        assert found.grad is not None and right.grad is not None, "a gradient is missing"
        errors.append(_error(found.grad, right.grad[:, :, own]))
    put_in: dict[str, int] = {}
    for row in sent.rows:
        put_in[row.collective] = put_in.get(row.collective, 0) + row.payload_bytes
    largest, means = zip(*errors, strict=True)
    return Apart(max(largest), max(means), put_in)


def _error(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    apart = found.detach() - wanted.detach()
    return apart.abs().max().item(), (apart.norm() / wanted.detach().norm()).item()


def merged_error(parts: int, sums: torch.dtype) -> float:
    """One process, bf16: attention to `parts` blocks of 64 keys, added up in `sums`; its error in the mean, as a part.

    Args:
        parts: how many blocks.
        sums: the type of the output so far.
    """
    above_zero("merged_error()", parts=parts)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 64 * n, 16, dtype=torch.bfloat16) for n in (1, parts, parts))
    out = torch.zeros_like(q, dtype=sums)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    for part_k, part_v in zip(k.split(64, 2), v.split(64, 2), strict=True):
        merge(out, lse, *attend_piece(q, part_k, part_v, causal=False))
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return _error(out.to(q.dtype), right)[1]


def gradient_error(parts: int, sums: torch.dtype) -> float:
    """One process, bf16: gradients of 64 keys, a term from each of `parts` blocks of 64 queries, added up in `sums`.

    Its error in the mean, as a part.

    Args:
        parts: how many blocks.
        sums: the type of the gradient so far.
    """
    above_zero("gradient_error()", parts=parts)
    torch.manual_seed(0)
    drawn = (torch.randn(1, 4, 64 * n, 16, dtype=torch.bfloat16) for n in (parts, parts, 1, 1))
    pull, q, k, v = drawn
    so_far = torch.zeros_like(k, dtype=sums)
    for own, g in zip(q.split(64, 2), pull.split(64, 2), strict=True):
        out, lse = attend_piece(own, k, v, causal=False)
        so_far += piece_gradients(g, own, k, v, out, lse, causal=False)[1]
    whole = k.double().requires_grad_()
    F.scaled_dot_product_attention(q.double(), whole, v.double()).backward(pull.double())
    assert whole.grad is not None, "a gradient is missing"
    return _error(so_far.to(k.dtype), whole.grad)[1]


def sent_bytes(put_in: Mapping[str, int], ranks: int) -> float:
    """What a rank of a ring sends, of what it put in: messages as they are, gathers passed on."""
    above_zero("sent_bytes()", ranks=ranks)
    factor = {"send": 1.0, "receive": 0.0, "all-gather": ranks - 1, "all-reduce": 2 * (ranks - 1) / ranks}  # fmt: skip
    return sum(factor.get(kind, (ranks - 1) / ranks) * size for kind, size in put_in.items())


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to the keys of all ranks, which each of them gathers; tokens in zigzag."""
    if not dist.is_initialized():
        raise RuntimeError("gathered() runs on ranks: start it by run_ranks.")
    mesh = device_mesh(ParallelDims(cp=dist.get_world_size()), "cpu")["cp"]
    return gathered_attention(q, k, v, mesh=mesh)


check_public(globals())
