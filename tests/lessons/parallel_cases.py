"""The same 20 training steps, taken by one process and by several ranks in several ways."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.lessons.lesson_04.data_parallel import accumulated_backward
from utils.models import Transformer, TransformerConfig, small_resnet

STEPS, BATCH, PARTS = 20, 8, 2
TINY = TransformerConfig(vocabulary=31, hidden=32, layers=2, heads=4, feedforward=48)
KINDS = ("DDP", "DDP, accumulated")
Batch = tuple[Tensor, Tensor]


class Trained(NamedTuple):
    """Losses of all steps, and the parameters and buffers after them."""

    losses: list[float]
    state: dict[str, Tensor]


def build(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """ "transformer", or the norm of a small ResNet: "group" or "batch"."""
    torch.manual_seed(seed)
    model = Transformer(TINY) if kind == "transformer" else small_resnet(kind, width=8)
    return model.to(dtype)


def batches(kind: str, dtype: torch.dtype) -> list[Batch]:
    """Whole batches, the same on every rank."""
    torch.manual_seed(1)
    if kind == "transformer":
        rows = [torch.randint(31, (BATCH, 13)) for _ in range(STEPS)]
        return [(row[:, :-1], row[:, 1:]) for row in rows]
    shape = (BATCH, 3, 12, 12)
    return [(torch.randn(shape, dtype=dtype), torch.randint(10, (BATCH,))) for _ in range(STEPS)]


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The losses of a batch's items, added up."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum")


def count(batch: Batch) -> int:
    """How many items a loss is over."""
    return batch[1].numel()


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What a plain training loop computes."""
    return summed_loss(model, batch) / count(batch)


def one_process(kind: str, dtype: torch.dtype) -> Trained:
    """The reference: the whole batch at once, no ranks."""
    model = build(kind, dtype)

    def backward(batch: Batch) -> float:
        loss = mean_loss(model, batch)
        loss.backward()
        return loss.item()

    return _train(model, model, batches(kind, dtype), backward)


def shard_by_shard(kind: str, dtype: torch.dtype, ranks: int) -> Trained:
    """One process that normalizes each rank's part by itself; running statistics of the first."""
    model = build(kind, dtype)

    def backward(batch: Batch) -> float:
        losses = []
        for number, part in enumerate(zip(*(t.chunk(ranks) for t in batch), strict=True)):
            with contextlib.nullcontext() if number == 0 else _buffers_kept(model):
                loss = mean_loss(model, part)
                (loss / ranks).backward()
            losses.append(loss.item())
        return sum(losses) / ranks

    return _train(model, model, batches(kind, dtype), backward)


def on_ranks(kind: str, dtype: torch.dtype, ways: tuple[str, ...] = KINDS) -> dict[str, Trained]:
    """A worker: all ways on this rank, each from a start of its own that rank 0's replaces."""
    return {way: _on_rank(way, kind, dtype) for way in ways}


def wrapped(model: nn.Module) -> nn.Module:
    """Data parallel, with buckets so small that there are several."""
    return DistributedDataParallel(model, bucket_cap_mb=0.06)


def _on_rank(way: str, kind: str, dtype: torch.dtype) -> Trained:
    seed = dist.get_rank()  # unequal, so that sharing the start matters
    model = build(kind, dtype, seed)
    parallel = wrapped(model)
    backward = functools.partial(_accumulated if "accumulated" in way else _plain, parallel)
    whole = batches(kind, dtype)
    return _train(model, parallel, whole, lambda batch: backward(own_rows(*batch)))


def own_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of a batch."""
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in tensors)


def _plain(model: nn.Module, batch: Batch) -> float:
    loss = mean_loss(model, batch)
    loss.backward()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _accumulated(model: nn.Module, batch: Batch) -> float:
    parts = list(zip(*(tensor.chunk(PARTS) for tensor in batch), strict=True))
    return accumulated_backward(model, parts, summed_loss, count).item()


def _train(
    model: nn.Module, called: nn.Module, data: list[Batch], backward: Callable[[Batch], float]
) -> Trained:
    called.train()
    # A small rate: a large one amplifies the rounding of sums in another order.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(backward(batch))
        optimizer.step()
    return Trained(losses, {name: t.detach().clone() for name, t in model.state_dict().items()})


@contextlib.contextmanager
def _buffers_kept(model: nn.Module):
    before = [buffer.clone() for buffer in model.buffers()]
    yield
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
