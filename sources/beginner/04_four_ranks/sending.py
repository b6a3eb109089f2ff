"""How sending takes its time: parts of a step in turns, backwards of DDP recorded, and buckets predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.models import small_resnet
from utils.traffic.counter import traffic
from utils.units import MIB

__all__ = ["Backward", "Bucket", "buckets_of", "in_turns", "profile_backwards", "timetable"]

FIRST_CAP_BYTES, CAP_BYTES = MIB, 25 * MIB  # DDP's defaults: of the first bucket, of the others
Seconds = tuple[float, float]


class Bucket(NamedTuple):
    """What one all-reduce takes, and after which part of backward, 0 to 1, its last gradient is there."""

    payload_bytes: int
    ready_share: float


class Backward(NamedTuple):
    """One backward of rank 0: when its layers were computed, its all-reduces, the buckets' bytes."""

    layers: Seconds
    reduces: list[Seconds]
    bucket_bytes: list[int]

    @property
    def until_sent_seconds(self) -> float:
        """From the first layer until all is computed and sent: the shorter, the less disturbed."""
        return max(self.layers[1], self.reduces[-1][1]) - self.layers[0]

    @property
    def layers_seconds(self) -> float:
        """From the first layer to the last."""
        return self.layers[1] - self.layers[0]

    def table(self) -> pd.DataFrame:
        """A row a bucket: its size, and when its all-reduce began and ended, in ms of this backward."""
        rows = []
        for size, span in zip(self.bucket_bytes, self.reduces, strict=True):
            begins, ends = (1e3 * (moment - self.layers[0]) for moment in span)
            left = 1e3 * (self.layers[1] - span[1])
            said = f"{left:.1f} ms before" if left > 0 else f"{-left:.1f} ms after"
            row = {"bucket, KiB": f"{size / 1024:.0f}", "begins, ms": f"{begins:.1f}"}
            rows.append(row | {"ends, ms": f"{ends:.1f}", "beside backward's end": said})
        return pd.DataFrame(rows, range(1, len(rows) + 1)).rename_axis("all-reduce")


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


def profile_backwards(batch: Sequence[Tensor], bucket_cap_mb: float) -> list[Backward]:
    """On each rank: nine backwards of DDP, recorded."""
    model = DistributedDataParallel(small_resnet(), bucket_cap_mb=bucket_cap_mb)
    images, labels = batch

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()

    for _ in range(2):  # after the first backward DDP orders its buckets anew
        step()
    with traffic() as sent:
        step()
    sizes = [row.payload_bytes for row in sent.collectives]
    found = [_profiled(step, sizes) for _ in range(9)]
    # On a busy machine a profile lacks an all-reduce now and then: only whole ones count.
    return [each for each in found if len(each.reduces) == len(sizes)]


def _profiled(step: Callable[[], None], bucket_bytes: list[int]) -> Backward:
    dist.barrier()  # ranks begin together
    with torch.profiler.profile() as profile:
        step()
    events = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events() or ()
    ]
    # A gradient's accumulation runs DDP's hook as well, and that may wait: it is no layer.
    layers = [
        (start, end)
        for name, start, end in events
        if name.startswith("autograd::engine::evaluate_function") and "AccumulateGrad" not in name
    ]
    reduces = sorted((start, end) for name, start, end in events if name == "gloo:all_reduce")
    whole = min(start for start, _ in layers), max(end for _, end in layers)
    return Backward(whole, reduces, bucket_bytes)


def in_turns(
    seconds_of: Callable[[Callable[[], object]], float],
    parts: Mapping[str, Callable[[], object]],
    rounds: int = 15,
) -> dict[str, float]:
    """The fastest seconds of each part, on this rank. All ranks begin together.

    In turns, and the fastest of the rounds: what else the machine does only adds. The first round
    warms up.

    Args:
        seconds_of: how a part is timed.
        parts: by name.
        rounds: that count.
    """

    def together(part: Callable[[], object]) -> float:
        dist.barrier()
        return seconds_of(part)

    timed = [{name: together(part) for name, part in parts.items()} for _ in range(rounds + 1)][1:]
    return {name: min(each[name] for each in timed) for name in parts}
