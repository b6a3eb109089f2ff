"""How sending takes its time: parts of a step timed in turns, and backwards of DDP recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from utils.models import small_resnet
from utils.traffic.counter import traffic
from utils.views.lanes import Span

from .machine import seconds_now

__all__ = ["Backward", "by_hidden_share", "in_turns", "over_links", "profile_backwards"]

Seconds = tuple[float, float]


class Backward(NamedTuple):
    """One backward: which it was, spans of layers and copies, all-reduces, the buckets' bytes.

    Times are those of the machine's clock, one for all ranks.
    """

    number: int
    spans: list[Span]
    reduces: list[Seconds]
    bucket_bytes: list[int]

    @property
    def end_seconds(self) -> float:
        """When the last layer's backward is over."""
        return max(span.end_seconds for span in self.spans if span.kind == "backward")

    @property
    def hidden_share(self) -> float:
        """Of the time of all-reduces, what passes before backward ends."""
        hidden = sum(max(0.0, min(end, self.end_seconds) - start) for start, end in self.reduces)
        return hidden / sum(end - start for start, end in self.reduces)


def profile_backwards(batch: Sequence[Tensor], bucket_cap_mb: float) -> list[Backward]:
    """On each rank: five backwards of DDP, recorded."""
    model = DistributedDataParallel(small_resnet(), bucket_cap_mb=bucket_cap_mb)
    images, labels = batch

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()

    for _ in range(2):  # after the first backward DDP orders its buckets anew
        step()
    with traffic() as sent:
        step()
    sizes = [row.payload_bytes for row in sent.collectives]
    found = [_profiled(step, number, sizes) for number in range(5)]
    # On a busy machine a profile lacks an all-reduce now and then: only whole ones count.
    return [each for each in found if len(each.reduces) == len(sizes)]


def by_hidden_share(ranks: Sequence[Sequence[Backward]]) -> list[list[Backward]]:
    """The backwards that all ranks recorded whole: of each, every rank's. Rank 0 gives the order."""
    numbered = [{each.number: each for each in rank} for rank in ranks]
    whole = set.intersection(*(set(rank) for rank in numbered))
    found = [[rank[number] for rank in numbered] for number in whole]
    return sorted(found, key=lambda each: each[0].hidden_share)


def _profiled(step: Callable[[], None], number: int, bucket_bytes: list[int]) -> Backward:
    dist.barrier()  # ranks begin together
    with torch.profiler.profile() as profile:
        step()
    recorded = profile.profiler
    assert recorded is not None and recorded.kineto_results is not None, "nothing was recorded"
    zero = recorded.kineto_results.trace_start_ns() / 1e9
    events = [
        (event.name, zero + event.time_range.start / 1e6, zero + event.time_range.end / 1e6)
        for event in profile.events() or ()
    ]
    spans = [
        Span("gradient into its bucket" if "AccumulateGrad" in name else "backward", start, end)
        for name, start, end in events
        if name.startswith("autograd::engine::evaluate_function")
    ]
    reduces = sorted((start, end) for name, start, end in events if name == "gloo:all_reduce")
    return Backward(number, spans, reduces, bucket_bytes)


def in_turns(parts: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """The fastest seconds of each part, on this rank. All ranks begin together.

    In turns, and the fastest of the rounds: what else the machine does only adds. The first round
    warms up.
    """
    timed = [{name: _seconds(part) for name, part in parts.items()} for _ in range(rounds + 1)][1:]
    return {name: min(each[name] for each in timed) for name in parts}


def _seconds(part: Callable[[], object]) -> float:
    dist.barrier()
    start = seconds_now()
    part()
    return seconds_now() - start


def over_links(
    seconds_of: Callable[..., float], speeds: Mapping[str, Sequence[float]], images: int
) -> pd.DataFrame:
    """What sending takes over links, beside steps of one GPU, and the images a GPU that hide it under AMP.

    Sending hides behind backward, which is taken to be two thirds of a step.

    Args:
        seconds_of: of a link's name, and of a factor of its rate.
        speeds: images a second of one GPU first, under "TF32" and "AMP".
        images: a GPU, in a step.
    """
    title = "predicted: eight A100, a ring at line rate"
    rows = []
    for name in ("NVLink 3", "PCIe 4 x16", "Ethernet 100G", "Ethernet 25G"):
        hide = (seconds_of(name, rate) * speeds["AMP"][0] / (2 / 3) for rate in (0.5, 1, 2))
        parts = {
            f"of the {kind} step": f"{seconds_of(name) * speeds[kind][0] / images:.0%}"
            for kind in ("TF32", "AMP")
        }
        row = {title: name, "sending, ms": f"{1e3 * seconds_of(name):.1f}", **parts}
        last = "images a GPU that hide it under AMP (half, full, double rate)"
        rows.append(row | {last: ", ".join(f"{n:.0f}" for n in hide)})
    return pd.DataFrame(rows).set_index(title)
