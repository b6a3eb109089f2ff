"""Data parallelism by hand: a replica on every rank, and gradients averaged in buckets.

Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704, section 3.2: replicas start equal, and each
bucket of gradients is all-reduced as soon as backward has filled it. `DataParallel` does so in
Python; PyTorch's `DistributedDataParallel` is the one for real runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checked import check_public
from utils.shims.torch_ import after_backward
from utils.units import MIB

__all__ = ["DataParallel", "accumulated_backward", "average_gradients", "buckets_of", "share_start"]

BUCKET_BYTES = 25 * MIB  # as DistributedDataParallel
MicroBatch = TypeVar("MicroBatch")


def share_start(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place.

    Raises:
        ValueError: this process is no rank.
    """
    _check_joined("share_start")
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def _check_joined(where: str) -> None:
    if not dist.is_initialized():
        raise ValueError(f"{where}: this process is no rank. Call it in a worker of run_ranks.")


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients by their mean over the ranks: one all-reduce of all of them, flat.

    Raises:
        RuntimeError: a parameter has no gradient; ranks would reduce tensors of unequal sizes.
        ValueError: no parameter, or this process is no rank.
    """
    if not parameters:
        raise ValueError("parameters is empty; give those whose gradients are to be averaged.")
    _divide_and_return(parameters, *_reduced(parameters))


def buckets_of(
    parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES
) -> list[list[nn.Parameter]]:
    """Group parameters in the order in which backward reaches them: the last layer first.

    A bucket holds one element type and device, and is closed by the parameter that takes it to
    `bucket_bytes` or past it. This is DistributedDataParallel's rule, so a bucket may be larger
    than its cap; DDP's default has a first bucket of 1 MiB besides.

    Raises:
        ValueError: the bucket has no room for anything.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket needs 1 byte or more.")
    buckets: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        last = buckets[-1] if buckets else []
        same = bool(last) and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if same and sum(p.nbytes for p in last) < bucket_bytes:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return buckets


class DataParallel(nn.Module):
    """A model on every rank of the process group, kept equal: hand-written DDP.

    Parameters and buffers are those of rank 0 from the start. `backward()` leaves the mean of all
    ranks' gradients: a bucket's all-reduce starts when its last gradient is there, while backward
    goes on. Buffers follow rank 0 before each forward in training.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Wrap a model; every rank of the group must do so.

        Raises:
            ValueError: no parameter is trained, the bucket is empty, or there is no group.
        """
        super().__init__()
        if not dist.is_initialized():
            raise ValueError("There is no process group here: use DataParallel in a worker.")
        trained = [p for p in module.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("No parameter of this model is trained: there is nothing to average.")
        share_start(module)
        self.module = module
        self.buckets = buckets_of(trained, bucket_bytes)
        self._arrived: list[set[Tensor]] = [set() for _ in self.buckets]
        self._under_way: list[tuple[list[nn.Parameter], Tensor, Any]] = []
        self._reduces, self._is_queued = True, False
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._hook(number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes from this rank's part of the batch."""
        if self.training and self._reduces:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds up this rank's gradients and sends nothing."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        return lambda parameter: self._ready(number, parameter) if self._reduces else None

    def _ready(self, number: int, parameter: Tensor) -> None:
        if not self._is_queued:  # run at the end of this backward, as DDP's reducer does
            after_backward(self._finish)
            self._is_queued = True
        self._arrived[number].add(parameter)
        bucket = self.buckets[number]
        if len(self._arrived[number]) == len(bucket):
            self._under_way.append((bucket, *_reduced(bucket)))

    def _finish(self) -> None:
        missing = sum(map(len, self.buckets)) - sum(map(len, self._arrived))
        under_way, self._under_way, self._is_queued = self._under_way, [], False
        for arrived in self._arrived:
            arrived.clear()
        for bucket, flat, work in under_way:
            _divide_and_return(bucket, flat, work)
        if missing:
            raise RuntimeError(
                f"{missing} of the parameters got no gradient, so their bucket was never sent. "
                "Freeze what the loss does not use, with requires_grad_(False), before wrapping."
            )


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
        model: `DataParallel`, `DistributedDataParallel`, or on one process any module.
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


def _reduced(bucket: Sequence[nn.Parameter]) -> tuple[Tensor, Any]:
    """Start to add up a flat copy of the gradients over the ranks."""
    gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
    without = len(bucket) - len(gradients)
    if without:
        raise RuntimeError(
            f"{without} of {len(bucket)} parameters have no gradient. Call backward() first, and "
            "give only parameters that the loss uses."
        )
    _check_joined("average_gradients")
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    return flat, dist.all_reduce(flat, async_op=True)


@torch.no_grad()
def _divide_and_return(bucket: Sequence[nn.Parameter], flat: Tensor, work: Any) -> None:
    work.wait()
    flat /= dist.get_world_size()
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        assert parameter.grad is not None  # `_reduced` has read it
        parameter.grad.copy_(part.view_as(parameter))


def _over_ranks(value: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


check_public(globals())
