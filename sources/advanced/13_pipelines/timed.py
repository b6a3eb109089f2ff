"""Stages that sleep for a known time, so that processes which share few cores behave as devices."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checked import check_public
from utils.parallel.actions import Action, Program, stage_owners
from utils.planner.schedules import Run
from utils.planner.schedules import timed as timed_run

__all__ = ["SleepingStage", "fastest", "launch_and_message", "rounds_of", "sleep_through"]

Spans = dict[Action, tuple[float, float]]


class SleepingStage(nn.Module):
    """A pipeline stage that sleeps in place of computing, and notes when.

    Its passes to the input and to the weight are separate nodes of the graph, as a zero-bubble
    schedule needs. It computes `x * weight`, with one weight, 1 at the start.

    Attributes:
        spans: Start and end in seconds of each pass: F, I and W; the clock is the machine's, the
            same in all its processes. The n-th pass of a kind is that of micro-batch n.
    """

    def __init__(
        self, stage: int, forward_seconds: float, input_seconds: float, weights_seconds: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.stage, self.spans = stage, Spans()
        self._takes = {"F": forward_seconds, "I": input_seconds, "W": weights_seconds}
        self._counts: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and pass `x` on."""
        self.sleep("F")
        return _Nap.apply(x, self, "I") * _Nap.apply(self.weight, self, "W")

    def forget(self) -> None:
        """Drop what was noted; the next pass of each kind is that of micro-batch 0."""
        self.spans = {}
        self._counts.clear()

    def sleep(self, kind: str) -> None:
        """One pass."""
        start = time.monotonic()
        time.sleep(self._takes[kind])
        self.spans[Action(self.stage, kind, self._counts[kind])] = (start, time.monotonic())
        self._counts[kind] += 1


class _Nap(torch.autograd.Function):
    """The identity, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, stage: SleepingStage, kind: str) -> Tensor:
        ctx.stage, ctx.kind = stage, kind
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.stage.sleep(ctx.kind)
        return gradients[0], None, None


def sleep_through(
    execute: Callable[..., Any],
    rows: Program,
    micro_batches: int,
    nap_seconds: float,
    rounds: int = 3,
) -> list[Spans]:
    """On every rank: run its list with stages that sleep; of each round, when each pass ran.

    Args:
        execute: `execute(actions, stages, owners, inputs)` runs one rank's list.
        rows: the program.
        micro_batches: as many inputs, of one number.
        nap_seconds: of a forward, and of either half of a backward, where a rank holds one stage.
        rounds: how often.
    """
    rank, owners, found = dist.get_rank(), stage_owners(rows), list[Spans]()
    nap = nap_seconds * dist.get_world_size() / len(owners)
    inputs = [torch.ones(1) for _ in range(micro_batches)]
    for _ in range(rounds):
        stages = {
            s: SleepingStage(s, nap, nap, nap) for s, owner in owners.items() if owner == rank
        }
        dist.barrier()
        execute(rows[rank], stages, owners, inputs)
        found.append({a: span for stage in stages.values() for a, span in stage.spans.items()})
    return found


def rounds_of(rows: Program, by_rank: Sequence[Sequence[Mapping[Any, Any]]]) -> list[Run]:
    """Each round of `sleep_through` as a run, the shortest first."""
    rounds = [
        timed_run(rows, {action: span for spans in one for action, span in spans.items()})
        for one in zip(*by_rank, strict=True)
    ]
    return sorted(rounds, key=lambda one: one.total)


def fastest(rows: Program, by_rank: Sequence[Sequence[Mapping[Any, Any]]]) -> Run:
    """The shortest round of `sleep_through`: other programs can only make a round longer."""
    return rounds_of(rows, by_rank)[0]


def launch_and_message(gpipe: Run) -> tuple[float, float]:
    """Seconds between passes that need not wait, and of a message: medians of a run of GPipe.

    The first rank's forwards and the last rank's backwards follow each other without waiting.
    """
    start, end, count = gpipe.starts, gpipe.ends, len(gpipe.starts[0]) // 2
    launches = [start[0][k + 1] - end[0][k] for k in range(count - 1)]
    launches += [start[-1][k + 1] - end[-1][k] for k in range(count, 2 * count - 1)]
    transfers = [start[rank + 1][0] - end[rank][0] for rank in range(len(start) - 1)]
    return statistics.median(launches), statistics.median(transfers)


check_public(globals())
