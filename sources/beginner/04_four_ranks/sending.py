"""How sending takes its time: calls timed, one backward of DDP recorded, and its lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from utils.models import small_resnet
from utils.traffic.counter import traffic
from utils.views.lanes import Span

from .machine import my_device, seconds_now

__all__ = ["Backward", "in_turns", "profile_backwards", "reducing_seconds"]

Seconds = tuple[float, float]


class Backward(NamedTuple):
    """One backward: the spans of its layers and its copies, the all-reduces, the buckets' bytes."""

    spans: list[Span]
    reduces: list[Seconds]
    bucket_bytes: list[int]

    @property
    def hidden_share(self) -> float:
        """Of the time of all-reduces, what layers of backward cover."""
        layers = [span for span in self.spans if span.kind == "backward"]
        covered = sum(
            max(0.0, min(end, layer.end_seconds) - max(start, layer.start_seconds))
            for start, end in self.reduces
            for layer in layers
        )
        return covered / sum(end - start for start, end in self.reduces)

    @property
    def lanes(self) -> dict[str, list[Span]]:
        """For a figure: the rank, then each bucket."""
        pairs = enumerate(zip(self.bucket_bytes, self.reduces, strict=True), start=1)
        sending = {
            f"bucket {number}, {size / 1024:.0f} KiB": [Span("all-reduce of a bucket", *span)]
            for number, (size, span) in pairs
        }
        return {"rank 0": self.spans} | sending


def profile_backwards(batch: Sequence[Tensor], bucket_cap_mb: float) -> list[Backward]:
    """On each rank: nine backwards of DDP, recorded, by how much of the sending they hide."""
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
    whole = [each for each in found if len(each.reduces) == len(sizes)]
    return sorted(whole, key=lambda each: each.hidden_share)


def _profiled(step: Callable[[], None], bucket_bytes: list[int]) -> Backward:
    with torch.profiler.profile() as profile:
        step()
    events = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profile.events() or ()
    ]
    spans = [
        Span("gradient into its bucket" if "AccumulateGrad" in name else "backward", start, end)
        for name, start, end in events
        if name.startswith("autograd::engine::evaluate_function")
    ]
    reduces = sorted((start, end) for name, start, end in events if name == "gloo:all_reduce")
    return Backward(spans, reduces, bucket_bytes)


def reducing_seconds(flat: bool, rounds: int = 3) -> float:
    """On each rank: the median seconds to all-reduce all gradients, one by one or as one tensor."""
    tensors = [torch.ones(p.numel(), device=my_device()) for p in small_resnet().parameters()]
    tensors = [torch.cat(tensors)] if flat else tensors

    def reduce_all() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return in_turns({"all": reduce_all}, rounds)["all"]


def in_turns(parts: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each part, on this rank. All ranks begin together.

    In turns, so that what else the machine does meets all parts alike; the first round warms up.
    """
    timed = [{name: _seconds(part) for name, part in parts.items()} for _ in range(rounds + 1)][1:]
    return {name: sorted(each[name] for each in timed)[rounds // 2] for name in parts}


def _seconds(part: Callable[[], object]) -> float:
    dist.barrier()
    start = seconds_now()
    part()
    return seconds_now() - start
