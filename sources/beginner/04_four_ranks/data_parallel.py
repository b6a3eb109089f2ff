"""Gradient accumulation over ranks: the mean over all tokens, sent once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checked import check_public

__all__ = ["accumulated_backward"]

MicroBatch = TypeVar("MicroBatch")


def accumulated_backward(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    summed_loss: Callable[[nn.Module, MicroBatch], Tensor],
    count: Callable[[MicroBatch], int],
) -> Tensor:
    """Backward through several micro-batches as if they and all ranks' were one batch.

    The loss is the mean over all items (tokens) of all micro-batches of all ranks. A mean of the
    micro-batches' means is not that where they hold unequal numbers; see
    https://github.com/huggingface/transformers/pull/34191. Gradients are sent once, in the last
    backward. Works without a process group as well, on one process.

    Args:
        model: `DistributedDataParallel`, or on one process any module.
        micro_batches: this rank's, one or more; every rank needs as many.
        summed_loss: the *sum* of the losses of a micro-batch's items, a scalar.
        count: how many items that sum is over.

    Returns:
        The mean loss over all items of all ranks, a scalar.

    Raises:
        ValueError: no micro-batch, or not one item on all ranks.
    """
    if not micro_batches:
        raise ValueError("There is no micro-batch to accumulate: give one or more to every rank.")
    device = next(model.parameters()).device
    total = _over_ranks(torch.tensor(sum(map(count, micro_batches)), device=device))
    if total == 0:
        raise ValueError("No rank has a token to learn from: all targets of this step are masked.")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = torch.zeros((), dtype=torch.float64, device=device)
    for number, micro_batch in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        quiet = (
            contextlib.nullcontext if is_last else getattr(model, "no_sync", contextlib.nullcontext)
        )
        with quiet():
            loss = summed_loss(model, micro_batch)
            (loss * (ranks / total.item())).backward()  # the average over ranks divides it again
        here += loss.detach()
    return _over_ranks(here) / total


def _over_ranks(value: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


check_public(globals())
