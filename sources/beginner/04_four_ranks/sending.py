"""How sending takes its time: buckets predicted, and the backward of layers that sleep, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from utils.units import MIB

__all__ = [
    "Backward",
    "Bucket",
    "buckets_of",
    "sleepy_data",
    "sleepy_layers",
    "timed_backward",
    "timetable",
]

FIRST_CAP_BYTES, CAP_BYTES = MIB, 25 * MIB  # DDP's defaults: of the first bucket, of the others
SIDE = 512  # of a layer that sleeps: 512 x 512 numbers in fp32 are 1 MiB
ITEMS = 4  # of a backward that is timed
Seconds = tuple[float, float]


class Bucket(NamedTuple):
    """What one all-reduce takes, and after which part of backward, 0 to 1, its last gradient is there."""

    payload_bytes: int
    ready_share: float


class Backward(NamedTuple):
    """One backward of this rank: how long it took, when its layers slept, when its buckets were sent.

    Moments are seconds since it began; `gradient` is the sum of all gradients.
    """

    seconds: float
    layers: list[Seconds]
    sent: list[Seconds]
    gradient: float


def buckets_of(make: Callable[[], nn.Module], shape: Sequence[int]) -> list[Bucket]:
    """DDP's buckets with its default caps, in the order of sending.

    Backward's time is dealt out over convolutions and linear layers by the FLOPs that they take.

    Args:
        make: builds the model; it is called on "meta", where nothing has data.
        shape: of its input.
    """
    with torch.device("meta"):
        model, images = make(), torch.randn(*shape)
    flops: dict[nn.Module, int] = {}

    def count(layer: Any, _: Any, made: torch.Tensor) -> None:
        flops[layer] = made.numel() * layer.weight[0].numel()

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    model(images)
    found, filled_bytes, done, cap_bytes = [], 0, 0, FIRST_CAP_BYTES
    for module in reversed(list(model.modules())):  # the last layer's gradients come first
        done += flops.get(module, 0)
        for parameter in reversed(list(module.parameters(recurse=False))):
            filled_bytes += parameter.nbytes
            if filled_bytes >= cap_bytes:
                found.append(Bucket(filled_bytes, done / sum(flops.values())))
                filled_bytes, cap_bytes = 0, CAP_BYTES
    return [*found, Bucket(filled_bytes, 1.0)] if filled_bytes else found


def timetable(
    buckets: Sequence[Bucket], backward_seconds: float, ranks: int, link_bytes_per_second: float
) -> list[Seconds]:
    """When each bucket travels, in seconds from backward's begin: in a ring, one after the other."""
    spans, free = [], 0.0
    for bucket in buckets:
        start = max(free, bucket.ready_share * backward_seconds)
        free = start + 2 * (ranks - 1) / ranks * bucket.payload_bytes / link_bytes_per_second
        spans.append((start, free))
    return spans


class _Sleep(torch.autograd.Function):
    """Nothing in forward, a sleep in backward: computing that no other process disturbs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds_per_item: float, slept: list[Seconds]) -> Tensor:
        ctx.seconds, ctx.slept = len(inputs) * seconds_per_item, slept
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        begin = time.perf_counter()
        time.sleep(ctx.seconds)
        ctx.slept.append((begin, time.perf_counter()))
        return gradients[0], None, None


class _SleepyLayer(nn.Module):
    def __init__(self, seconds_per_item: float, slept: list[Seconds]) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE, bias=False)
        self.seconds_per_item, self.slept = seconds_per_item, slept

    def forward(self, inputs: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(inputs), self.seconds_per_item, self.slept)  # type: ignore[no-any-return]


class _SleepyLayers(nn.Sequential):
    def __init__(self, count: int, seconds_per_item: float) -> None:
        slept: list[Seconds] = []
        super().__init__(*(_SleepyLayer(seconds_per_item, slept) for _ in range(count)))
        self.slept = slept


def sleepy_layers(count: int, seconds_per_item: float) -> nn.Sequential:
    """Linear layers of 1 MiB, each of which sleeps in backward before it makes its gradient.

    Their weights are the same in each call. They take `SIDE` numbers an item.

    Args:
        count: of the layers.
        seconds_per_item: that each one sleeps.
    """
    torch.manual_seed(0)
    return _SleepyLayers(count, seconds_per_item)


def sleepy_data(items: int) -> TensorDataset:
    """Items for layers that sleep."""
    return TensorDataset(torch.randn(items, SIDE))


def timed_backward(
    model: DistributedDataParallel, sent: list[Seconds], rounds: int = 4
) -> Backward:
    """The fastest backward of a few, of four items: what else the machine does only adds.

    All ranks begin together. Two more come first: after the first one DDP orders its buckets anew.

    Args:
        model: DDP of `sleepy_layers`.
        sent: where its hook notes when it sent.
        rounds: that count.
    """
    slept, found = model.module.slept, []
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(ITEMS, SIDE)
    for _ in range(rounds + 2):
        loss = model(inputs).square().mean()
        model.zero_grad()
        sent.clear()
        slept.clear()
        dist.barrier()
        begin = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - begin
        layers, spans = ([(a - begin, b - begin) for a, b in noted] for noted in (slept, sent))
        total = sum(p.grad.double().sum().item() for p in model.parameters() if p.grad is not None)
        found.append(Backward(seconds, layers, spans, total))
    return min(found[2:], key=lambda each: each.seconds)
