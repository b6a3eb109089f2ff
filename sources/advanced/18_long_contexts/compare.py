"""Attention over ranks beside one process: how far apart, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from utils.checked import check_public
from utils.parallel.context import gathered_attention
from utils.parallel.dims import ParallelDims
from utils.parallel.mesh import device_mesh
from utils.rules import above_zero
from utils.traffic.counter import traffic

__all__ = ["Apart", "apart", "gathered", "sent_bytes"]

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
