"""PyTorch's own ring, with this CPU's kernel in it: what it sends, by either method.

`context_parallel` reaches kernels of CUDA alone. What surrounds the kernel is Python that runs anywhere, in
`torch/distributed/tensor/experimental/_context_parallel/_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checked import check_public

from .pieces import attend_piece, piece_gradients

__all__ = ["pytorch_ring", "pytorch_sent_bytes"]


def pytorch_ring(method: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention (B, A, S / ranks, D) as PyTorch's `context_parallel` shares it; tokens in zigzag.

    Args:
        method: "alltoall" or "allgather", as its `set_rotate_method` takes it.
    """
    return _Attention(method)


def pytorch_sent_bytes(put_in: Mapping[str, int], ranks: int) -> int:
    """What a rank sends: a hop of this ring is an all-to-all whose whole tensor goes to one neighbour."""
    return put_in.get("all-to-all", 0) + (ranks - 1) * put_in.get("all-gather", 0)


class _Attention:
    def __init__(self, method: str) -> None:
        self._method = method

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries."""
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self._method)
        return _Ring.apply(q, k, v)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _library()._templated_ring_attention(
            dist.group.WORLD, 2, _kernel, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return _library()._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            _kernel_gradients,
            gradients[0],
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            True,
        )


def _library() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    return attend_piece(q, k, v, is_causal)


def _kernel_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return piece_gradients(grad_out, query, key, value, out, logsumexp, is_causal)


check_public(globals())
