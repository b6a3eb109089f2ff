"""Pipelines on real ranks: the same training by every schedule, what stages hold, what goes wrong."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_cases import nothing_left
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from utils.lessons.lesson_13.own_schedule import OwnSchedule
from utils.lessons.lesson_13.saved import saved_for_backward
from utils.lessons.lesson_13.timed import SleepingStage, fastest, launch_and_message
from utils.models import Transformer, TransformerConfig
from utils.parallel import (
    ParallelDims,
    chunks_of,
    device_mesh,
    even_blocks,
    keep_chunk,
    pipeline_passes,
    summed_loss,
)
from utils.parallel.actions import Action
from utils.planner.schedules import in_flight, run_schedule, schedule_actions
from utils.ranks import RankError, run_ranks

CONFIG = TransformerConfig(vocabulary=17, hidden=16, layers=8, heads=2, feedforward=24)
RANKS, MICRO_BATCHES, LENGTH, STEPS = 4, 8, 6, 20
SCHEDULES = {
    "GPipe": 4,
    "1F1B": 4,
    "Interleaved1F1B": 8,
    "LoopedBFS": 8,
    "InterleavedZeroBubble": 8,
    "ZBVZeroBubble": 8,
    "DualPipeV": 8,
    "ZB-H1 from CSV": 4,
}
OWN = {"ZB-H1 from CSV": OwnSchedule(schedule_actions("zb-h1", RANKS, MICRO_BATCHES))}


def model(dtype: torch.dtype) -> Transformer:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return Transformer(CONFIG).to(dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(
        17, (2, MICRO_BATCHES, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    return inputs, targets


def trained(passes, parts: list[nn.Module], steps: int) -> tuple[list[float], dict]:
    """Losses of all steps, and the gradients of the first."""
    parameters = {name: p for part in parts for name, p in part.named_parameters()}
    optimizer, losses, first = torch.optim.SGD(parameters.values(), lr=0.02), [], {}
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        losses.append(passes(inputs, targets, 1 / targets.numel()).item())
        first = first or {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
    return losses, first


def one_process(dtype: torch.dtype, steps: int):
    whole = model(dtype)

    def passes(inputs, targets, weight):
        total = torch.zeros((), dtype=dtype)
        for x, y in zip(inputs.split(1), targets.split(1), strict=True):
            loss = summed_loss(whole(x), y) * weight
            loss.backward()
            total += loss.detach()
        return total

    return trained(passes, [whole], steps)


def on_ranks(dtype: torch.dtype, steps: int):
    """A worker: training by every schedule."""
    mesh, found = device_mesh(ParallelDims(pp=RANKS), "cpu"), {}
    for name, chunks in SCHEDULES.items():
        held = (
            OWN[name].held(dist.get_rank())
            if name in OWN
            else chunks_of(name, dist.get_rank(), RANKS, chunks)
        )
        parts = [
            keep_chunk(model(dtype), even_blocks(CONFIG.layers, chunks), chunk) for chunk in held
        ]
        passes = pipeline_passes(
            parts,
            mesh,
            torch.arange(LENGTH),
            torch.empty(1, LENGTH, CONFIG.hidden, device="meta", dtype=dtype),
            chunks=chunks,
            schedule=OWN.get(name, name),
            micro_batches=MICRO_BATCHES,
        )
        found[name] = trained(passes, parts, steps)
    return found


@pytest.mark.parametrize(
    ("dtype", "steps", "loss_gap", "gradient_gap"),
    [
        (torch.float64, 6, 1e-9, 1e-12),
        (torch.float32, 2, 1e-5, 1e-6),
        pytest.param(torch.float64, STEPS, 1e-9, 1e-12, marks=pytest.mark.slow),
        pytest.param(torch.float32, STEPS, 1e-5, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_trains_as_one_process_does(dtype, steps, loss_gap, gradient_gap):
    results = run_ranks(on_ranks, RANKS, dtype, steps, timeout_seconds=240)
    losses, gradients = one_process(dtype, steps)
    if steps == STEPS:
        assert losses[0] - losses[-1] > 0.01, "it learns, so that equal losses say something"
    for name in SCHEDULES:
        found = [result[name] for result in results]
        for row, _ in found:
            assert row == pytest.approx(losses, rel=0, abs=loss_gap), name
        parts = {key: g for _, grads in found for key, g in grads.items()}
        assert parts.keys() == gradients.keys(), name
        gaps = [(parts[key] - gradients[key]).norm() for key in gradients]
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        assert torch.stack(gaps).norm() / norm < gradient_gap, name


# What stages hold ---------------------------------------------------------------------------------


def held_by_pytorch() -> dict[str, tuple[int, int]]:
    """A worker: the peak of a step's saved bytes, and what one micro-batch alone keeps."""
    rank, found = dist.get_rank(), {}
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    for name in ("GPipe", "1F1B"):
        stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
        schedule = get_schedule_class(name)(stage, n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
        for _ in range(2):
            x, y = torch.ones(MICRO_BATCHES * 3, 8), torch.zeros(MICRO_BATCHES * 3, 8)
            with saved_for_backward([*part.parameters(), x, y]) as saved:
                schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 3 else {}))
        found[name] = saved.peak_bytes, saved.live_bytes
    x = torch.ones(3, 8, requires_grad=rank > 0)
    with saved_for_backward([*part.parameters(), *([] if rank else [x])]) as saved:
        y = part(x)
        loss = F.mse_loss(y, torch.zeros(3, 8)) if rank == RANKS - 1 else y
        found["alone"] = saved.peak_bytes - (3 * 8 * 4 if rank == RANKS - 1 else 0), 0
    del y, loss
    return found


def test_pytorch_s_stages_hold_what_the_schedule_says():
    for rank, found in enumerate(run_ranks(held_by_pytorch, RANKS)):
        one = found["alone"][0]
        for name, row in (
            ("GPipe", schedule_actions("gpipe", RANKS, 8)[rank]),
            ("1F1B", schedule_actions("1f1b", RANKS, 8)[rank]),
        ):
            assert found[name] == (in_flight(row) * one, 0), (rank, name, one)


def test_saved_bytes_count_each_storage_once_and_go_with_the_graph():
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4)
    with saved_for_backward([weight]) as saved:
        y = x @ weight
        z = (y * y).sum()  # both factors are one storage
    assert saved.live_bytes == saved.peak_bytes == x.nbytes + y.nbytes
    z.backward()
    assert (saved.live_bytes, saved.peak_bytes) == (0, x.nbytes + y.nbytes)


# Sleeping stages ----------------------------------------------------------------------------------


def test_a_sleeping_stage_has_two_backwards():
    stage, x = SleepingStage(3, 0.0, 0.0, 0.0), torch.tensor([2.0], requires_grad=True)
    y = stage(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones(1), retain_graph=True)
    assert set(stage.spans) == {Action(3, "F", 0), Action(3, "I", 0)} and gradient.item() == 1.0
    torch.autograd.backward(y, torch.ones(1), inputs=[stage.weight])
    assert Action(3, "W", 0) in stage.spans and stage.weight.grad.item() == 2.0
    stage(x)
    assert Action(3, "F", 1) in stage.spans
    stage.forget()
    assert stage.spans == {}


# What goes wrong ----------------------------------------------------------------------------------


def test_launches_and_messages_are_read_off_a_run_of_gpipe():
    ran = run_schedule(schedule_actions("gpipe", RANKS, 4), 1.0, 2.0, 0.25, launch=0.5)
    assert launch_and_message(ran) == pytest.approx((0.5, 0.25), rel=1e-12)


def test_of_several_rounds_the_shortest_is_kept():
    rows = schedule_actions("gpipe", 1, 1)
    forward, backward = rows[0]
    long, short = ({forward: (5.0, 6.0), backward: (6.0, end)} for end in (9.0, 8.0))
    assert fastest(rows, [[long, short, long]]).total == 3.0


def test_layers_that_do_not_divide():
    assert even_blocks(8, 4) == (2, 2, 2, 2)
    with pytest.raises(
        ValueError, match="8 layers do not divide over 3 chunks; 1, 2, 4, 8 would do"
    ):
        even_blocks(8, 3)


def uneven_rows():
    mesh = device_mesh(ParallelDims(pp=2), "cpu")
    part = keep_chunk(model(torch.float32), (4, 4), dist.get_rank())
    passes = pipeline_passes(
        [part],
        mesh,
        torch.arange(LENGTH),
        torch.empty(1, LENGTH, 16, device="meta"),
        chunks=2,
        schedule="1F1B",
        micro_batches=3,
    )
    passes(*batch(0), 1.0)


def test_micro_batches_that_do_not_divide():
    with pytest.raises(
        RankError, match="8 rows do not divide into 3 micro-batches of this pipeline"
    ):
        run_ranks(uneven_rows, 2)


def test_a_program_is_checked_before_pytorch_gets_it():
    rows = schedule_actions("1f1b", 2, 2)
    with pytest.raises(ValueError, match=re.escape("Rank 1 never runs 1B1")):
        OwnSchedule([rows[0], rows[1][:-1]])([], n_microbatches=2, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match=re.escape("0F1 is of micro-batch 1; there are 1, from 0")):
        OwnSchedule(rows)([], n_microbatches=1, loss_fn=F.mse_loss)


class Deadly(nn.Linear):
    """Dies in its third forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if dist.get_rank() == 2 and self.calls == 3 and not x.is_meta:
            os.kill(os.getpid(), 9)
        return super().forward(x)


def a_rank_dies():
    rank = dist.get_rank()
    stage = PipelineStage(Deadly(4, 4), rank, RANKS, torch.device("cpu"))
    schedule = get_schedule_class("1F1B")(stage, n_microbatches=8, loss_fn=F.mse_loss)
    x, y = torch.ones(8, 4), torch.ones(8, 4)
    schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == 3 else {}))


def test_a_rank_that_dies_in_a_pipeline_is_named_and_the_neighbours_end():
    started = time.monotonic()
    with nothing_left(), pytest.raises(RankError) as caught:
        run_ranks(a_rank_dies, RANKS, timeout_seconds=20)
    assert time.monotonic() - started < 22
    assert caught.value.rank == 2 and "rank 2 was killed by SIGKILL" in str(caught.value)
