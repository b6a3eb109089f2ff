"""Attention of some queries to some keys, with what is needed to add such pieces up: flash attention's kernel.

The kernel of this machine gives outputs and log-sum-exps, as the one on GPUs does, and its backward takes
those of the *whole* sum, so that a piece of keys gives its term of every gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils.checked import check_public

__all__ = ["attend_piece", "piece_gradients"]


def attend_piece(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Outputs (B, A, S, D) and log-sum-exps of scores (B, A, S), in fp32 or finer.

    Args:
        q: (B, A, S, D).
        k, v: (B, K, T, D); heads A / K share one.
        causal: query i sees keys 0 to i; else all.
    """
    group = _heads_that_share(q, k, v)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, _spread(k, group), _spread(v, group), 0.0, causal)
    return out, lse


def piece_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This piece's terms of the gradients of q, k and v.

    Args:
        gradient, out, lse: of these queries, over *all* keys they see.
        q, k, v, causal: as `attend_piece` had them.
    """
    group = _heads_that_share(q, k, v, gradient, out)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    to_q, *to_kv = kernel(gradient, q, _spread(k, group), _spread(v, group), out, lse, 0.0, causal)
    to_k, to_v = (_folded(found, group) for found in to_kv)
    return to_q, to_k, to_v


def _heads_that_share(q: Tensor, k: Tensor, *others: Tensor) -> int:
    for tensor in (q, k, *others):
        if tensor.dim() != 4:
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} is none of (batch, heads, tokens, width)."
            )
    return q.shape[1] // k.shape[1]


def _spread(heads: Tensor, group: int) -> Tensor:
    return heads if group == 1 else heads.repeat_interleave(group, 1)


def _folded(gradient: Tensor, group: int) -> Tensor:
    return gradient if group == 1 else gradient.unflatten(1, (-1, group)).sum(2)


check_public(globals())
