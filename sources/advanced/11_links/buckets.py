"""Steps of two hosts whose gradients are reduced in buckets: all sizes run, and laid side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from utils.views.lanes import Span

from .algorithms import ring_all_reduce
from .wire import Wire

Run = tuple[list[Span], float]  # what happened when, and the step's seconds
Case = tuple[float, int]  # seconds more a start, and layers in a bucket
RUNS = 4


def sweep(
    wire: Wire,
    train_step: Callable[[Wire, int, float], Run],
    sizes: Mapping[int, int],
    starts: Sequence[float],
) -> tuple[list[tuple[int, float]], dict[Case, Run]]:
    """All-reduces of every size alone, and the fastest of some steps of each case.

    Args:
        wire: joins the two hosts.
        train_step: of the wire, the layers in a bucket, and seconds more a start.
        sizes: a bucket's bytes, by its layers.
        starts: seconds more that an all-reduce takes to start.
    """
    alone = [
        (nbytes, min(_seconds_alone(wire, nbytes) for _ in range(RUNS)))
        for nbytes in sizes.values()
    ]
    runs = {
        (more, layers): [train_step(wire, layers, more) for _ in range(RUNS)]
        for more in starts
        for layers in sizes
    }
    return alone, {case: min(each, key=lambda run: run[1]) for case, each in runs.items()}


def _seconds_alone(wire: Wire, nbytes: int) -> float:
    dist.barrier()
    start = time.monotonic()
    ring_all_reduce(wire, torch.ones(nbytes // 4))
    return time.monotonic() - start


def bucket_lanes(runs: Mapping[str, Run]) -> dict[str, list[Span]]:
    """The first run's backward, and below it the all-reduces of every run, each from its own start."""
    lanes: dict[str, list[Span]] = {}
    for name, (spans, _) in runs.items():
        start = min(span.start_seconds for span in spans if span.kind == "backward")
        for kind, lane in (("backward", "backward"), ("all-reduce", name)):
            lanes.setdefault(
                lane,
                [
                    Span(kind, s.start_seconds - start, s.end_seconds - start)
                    for s in spans
                    if s.kind == kind
                ],
            )
    return lanes
