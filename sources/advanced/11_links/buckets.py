"""Steps of two hosts whose gradients are reduced in buckets: all sizes run, and laid side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from utils.views.lanes import Span, draw_lanes

from .algorithms import ring_all_reduce
from .wire import Wire

Run = tuple[list[Span], float]  # what happened when, and the step's seconds
Case = tuple[float, int]  # seconds more a start, and layers in a bucket
RUNS, RUNS_ALONE = 4, 12  # alone is short, and one disturbed measurement spoils all predictions


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
    rounds = [
        [_seconds_alone(wire, nbytes) for nbytes in sizes.values()] for _ in range(RUNS_ALONE)
    ]
    alone = list(zip(sizes.values(), map(min, zip(*rounds, strict=True)), strict=True))
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
    """The first run's backward, and below it what every run sent, each from its own start."""
    lanes: dict[str, list[Span]] = {}
    for name, (spans, _) in runs.items():
        start = min(span.start_seconds for span in spans if span.kind == "backward")
        moved = [Span(s.kind, s.start_seconds - start, s.end_seconds - start) for s in spans]
        lanes.setdefault("backward", [s for s in moved if s.kind == "backward"])
        # An all-reduce first: kinds get their colours in the order in which they appear.
        sent = [s for s in moved if s.kind != "backward"]
        lanes[name] = sorted(sent, key=lambda s: (s.kind, s.start_seconds))
    return lanes


def draw_buckets(runs: Mapping[str, Run], *, title: str, device: str) -> Figure:
    """The lanes, and a line where backward ends: what lies right of it is not hidden."""
    lanes = bucket_lanes(runs)
    figure = draw_lanes(lanes, title=title, device=device)
    end_ms = 1e3 * lanes["backward"][0].end_seconds
    axes = figure.axes[0]
    axes.axvline(end_ms, color="black", lw=1.2, ls="--", zorder=3)
    axes.annotate(
        "backward ends: what is right of it, shows",
        (end_ms, 0),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=9,
        va="center",
    )
    return figure
