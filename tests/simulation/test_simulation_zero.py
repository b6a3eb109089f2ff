"""DeepSpeed's own code and FSDP2 on simulated ranks, held against the same on four real ones."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from zero_cases import STAGES, TINY, WORLD, adamw, model, parameter_sizes

from utils.memory import measure
from utils.memory.events import Category
from utils.memory.measurement import Measurement
from utils.ranks import run_ranks, traffic
from utils.simulation import simulate
from utils.techniques.deepspeed import deepspeed_missing, deepspeed_problem
from utils.techniques.fsdp import shard_blocks
from utils.techniques.zero import note_states, zero_config, zero_engine

P = sum(parameter_sizes())
pytestmark = pytest.mark.deepspeed
needs_deepspeed = pytest.mark.skipif(bool(deepspeed_missing()), reason=str(deepspeed_missing()))
NAMES = ["DDP", "FSDP2", *(pytest.param(name, marks=needs_deepspeed) for name in STAGES)]


def build(name: str) -> tuple[Any, torch.optim.Optimizer]:
    """What is called, backward included, and its optimizer."""
    network = model()
    if name == "FSDP2":
        network = shard_blocks(network)
    elif name == "DDP":
        network = DistributedDataParallel(network)
    optimizer = adamw(network.parameters())
    if name not in STAGES:
        return network, optimizer
    config = zero_config(STAGES[name], P, world_size=dist.get_world_size(), micro_batch=4)
    return zero_engine(network, optimizer, config), optimizer


def step(called: Any, optimizer: torch.optim.Optimizer) -> None:
    """Inputs are made inside, as a simulation wants it."""
    with torch.autocast("cpu", torch.bfloat16, isinstance(called, DistributedDataParallel)):
        logits = called(torch.randint(TINY.vocabulary, (4, 32))).flatten(0, 1).float()
    loss = F.cross_entropy(logits, torch.randint(TINY.vocabulary, (128,)))
    del logits
    if hasattr(called, "backward"):
        called.backward(loss)
        note_states(called)
        called.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def inner(called: Any) -> Any:
    """The module whose memory is metered."""
    return called.module if hasattr(called, "backward") else called


def on_rank(name: str) -> tuple[Measurement, Counter]:
    called, optimizer = build(name)
    found = measure(
        lambda: step(called, optimizer), model=inner(called), optimizer=optimizer, timed_steps=0
    )
    with traffic() as sent:
        step(called, optimizer)
    return found, payloads(sent.rows)


def payloads(rows: Any) -> Counter:
    """Bytes by collective and dtype, single numbers left out."""
    found: Counter = Counter()
    for row in rows:
        if not row.at_startup and row.payload_bytes > 64:
            found[row.collective, row.dtype] += row.payload_bytes
    return found


def loaded_for(name: str) -> None:
    """DeepSpeed in this process, from where ranks get it ready-made and simulations know of it."""
    if name in STAGES:
        assert deepspeed_problem() is None


@functools.cache
def real(name: str, launch: int = 0) -> tuple[Measurement, Counter]:
    loaded_for(name)
    return run_ranks(on_rank, WORLD, name, timeout_seconds=300)[0]


@functools.cache
def simulated(name: str, world: int = WORLD) -> Measurement:
    loaded_for(name)
    kept: list[Any] = []

    def built() -> Any:
        kept[:] = build(name)
        return inner(kept[0]), kept[1]

    found = simulate(built, lambda *_: step(*kept), world=world, device="cpu")
    kept.clear()
    return found


def largest(found: Measurement, category: str) -> int:
    return max(
        (int(c.max()) for k, c in found.timeline.series().items() if str(k) == category), default=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_peak_equals_that_of_real_ranks_to_the_byte(name):
    """Threads of gloo's let go when they please, of what FSDP sent last: the least launch counts."""
    found = simulated(name)  # it also counts what DeepSpeed keeps and names nowhere: one byte
    assert found.breakdown[Category.KEPT] <= 1, "more than ZeRO-3's one flag"
    expected = found.peak_bytes - found.breakdown[Category.KEPT]
    launches = range(5 if name == "FSDP2" else 1)
    apart = (real(name, launch)[0].peak_bytes - expected for launch in launches)
    seen = list(itertools.takewhile(bool, apart))
    assert len(seen) < len(launches), f"never equal: {seen} bytes apart"
    assert min(seen, default=0) >= 0, "a launch below the simulated peak"


@pytest.mark.parametrize("name", NAMES)
def test_every_category_at_the_peak_equals_that_of_real_ranks(name):
    """A buffer that gloo still holds may reach the same peak at another moment: one launch in five."""
    measured, found = real(name)[0], simulated(name)
    if not found.breakdown[Category.KEPT]:  # nothing that only a simulation sees
        launches = (real(name, launch)[0] for launch in range(5 if name == "FSDP2" else 1))
        breakdowns = (dict(one.breakdown) for one in launches)
        assert dict(found.breakdown) in breakdowns, f"{name}: {dict(measured.breakdown)}"
    for category in ("parameters", "gradients", "optimizer state", "activations"):
        assert largest(found, category) == largest(measured, category) > 0


@needs_deepspeed
@pytest.mark.parametrize("name", STAGES)
def test_the_bucket_of_backward_is_known(name):
    bucket = zero_config(STAGES[name], P, world_size=WORLD)["zero_optimization"][
        "reduce_bucket_size"
    ]
    assert largest(real(name)[0], "communication buffers") >= 2 * bucket


def test_what_fsdp_gathers_and_reduces_is_no_temporary_and_no_input():
    """The root is gathered before forward begins; a block's gradients are reduced in float32."""
    found = real("FSDP2")[0]
    block = sum(p.numel() for p in model().blocks[0].parameters())
    assert found.breakdown[Category.INPUTS] == 4 * 32 * 8
    assert largest(found, "communication buffers") >= (4 + 2 + 2) * block  # flat, flat, gathered


@pytest.mark.parametrize("name", NAMES)
def test_traffic_equals_that_of_real_ranks(name):
    assert payloads(simulated(name).traffic) == real(name)[1]


@needs_deepspeed
@pytest.mark.parametrize("stage, whole, shared", [(1, 2, 12), (2, 2, 12), (3, 0, 14)])
def test_worlds_follow_one_another_in_one_process(stage, whole, shared):
    """DeepSpeed remembers its first world; a second simulation must not meet it there."""
    for world in (2, 8):
        found = simulated(f"ZeRO-{stage}", world)
        lasting = sum(largest(found, c) for c in ("parameters", "optimizer state"))
        assert lasting == pytest.approx((whole + shared / world) * P, rel=0.01)


@needs_deepspeed
def test_nothing_of_a_simulation_stays_behind(monkeypatch):
    import deepspeed.comm.comm as comm
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def reach() -> tuple[Any, ...]:
        zero = DeepSpeedZeroOptimizer
        return zero.__init__, zero.has_overflow, torch.Tensor.data_ptr, F.linear, comm.cdb

    before = reach()
    for name in ("ZeRO-1", "ZeRO-3"):
        simulated.__wrapped__(name)
    assert reach() == before and "LOCAL_RANK" not in os.environ
