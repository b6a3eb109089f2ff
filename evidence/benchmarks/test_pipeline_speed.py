"""Measured bubbles of pipelines of sleeping stages, beside those drawn from the same programs.

Stages sleep, so that four processes on two cores behave as four devices. Drawn with launch and send
as measured on GPipe; `measured - drawn` is in shares of the work (m micro-batches of one rank).
"""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils.lessons.lesson_13.own_schedule import OwnSchedule
from utils.lessons.lesson_13.timed import SleepingStage
from utils.parallel import chunks_of, read_program, stage_owners
from utils.planner.schedules import Run, run_schedule, schedule_actions, timed
from utils.ranks import run_ranks

from .conftest import Report

RANKS, MICRO_BATCHES, NAP, BUDGET = 4, 8, 0.03, 0.05
CHUNKS = {
    "GPipe": 4,
    "1F1B": 4,
    "Interleaved1F1B": 8,
    "LoopedBFS": 8,
    "InterleavedZeroBubble": 8,
    "ZBVZeroBubble": 8,
    "DualPipeV": 8,
    "ZB-H1": 4,
}


def asleep(name: str, micro_batches: int = MICRO_BATCHES):
    """A worker: the program that ran, as texts, and when each pass of this rank did."""
    rank, count = dist.get_rank(), CHUNKS[name]
    own = (
        OwnSchedule(schedule_actions(name.lower(), RANKS, micro_batches))
        if name == "ZB-H1"
        else None
    )
    held, nap = own.held(rank) if own else chunks_of(name, rank, RANKS, count), NAP * RANKS / count
    parts = [SleepingStage(s, nap, nap, nap) for s in held]
    stages = [PipelineStage(p, p.stage, count, torch.device("cpu")) for p in parts]
    kind = own or get_schedule_class(name)
    schedule = kind(
        stages if own or count > RANKS else stages[0],
        n_microbatches=micro_batches,
        loss_fn=F.mse_loss,
    )
    for _ in range(2):  # the first step finds out the shapes
        x = torch.ones(micro_batches, 1, requires_grad=True)
        ends = {"target": torch.zeros(micro_batches, 1)} if count - 1 in held else {}
        for part in parts:
            part.forget()
        dist.barrier()
        schedule.step(*([x] if 0 in held else []), **ends)
    # One stage a rank: the planner has the program. PyTorch's says when gradients are scaled, too.
    program = schedule.pipeline_order if count > RANKS else {}
    texts = [[str(action or "") for action in program[r]] for r in sorted(program)]
    return texts, {action: span for part in parts for action, span in part.spans.items()}


def ran(name: str, micro_batches: int = MICRO_BATCHES) -> tuple[list, Run]:
    """The program, and its measured run."""
    results = run_ranks(asleep, RANKS, name, micro_batches)
    rows = read_program(results[0][0])
    if not rows:
        rows = schedule_actions(name.lower(), RANKS, micro_batches)
    return rows, timed(rows, {a: span for _, spans in results for a, span in spans.items()})


@pytest.fixture(scope="module")
def costs() -> tuple[float, float]:
    """Seconds of a launch and of a message, from GPipe on four micro-batches."""
    _, found = ran("GPipe", 4)
    start, end = found.starts, found.ends
    launches = [start[0][k + 1] - end[0][k] for k in range(3)]
    launches += [start[-1][k + 1] - end[-1][k] for k in (4, 5, 6)]
    messages = [start[r + 1][0] - end[r][0] for r in range(3)]
    return statistics.median(launches), statistics.median(messages)


@pytest.mark.parametrize("name", CHUNKS)
def test_bubbles(name: str, costs: tuple[float, float], report: Report) -> None:
    launch, message = costs
    rows, found = ran(name)
    nap, work = NAP * RANKS / len(stage_owners(rows)), 3 * MICRO_BATCHES * NAP
    drawn = run_schedule(rows, nap, 2 * nap, message, launch=launch)
    what = (
        f"{name}, p = {RANKS}, m = {MICRO_BATCHES}, sleep {NAP} s: bubble {found.total / work - 1:.3f}, "
        f"drawn {drawn.total / work - 1:.3f}; apart"
    )
    report(what, abs(found.total - drawn.total) / work, BUDGET, "x")
