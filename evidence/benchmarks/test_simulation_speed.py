"""How long simulations of large steps take, and PyTorch's private MemTracker on the same step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from utils.memory import Measurement
from utils.models import Transformer, TransformerConfig
from utils.simulation import extrapolate, simulate
from utils.units import GIB

from .conftest import Report
from .simulation_cases import (
    LARGE,
    LARGE_LAYERS,
    SEVEN_B,
    SEVEN_B_LAYERS,
    WORLD,
    large_sharded,
    seven_b,
    seven_b_adapted,
    step_of,
)

WHOLE_BUDGET_SECONDS, EXTENDED_BUDGET_SECONDS, ADAPTED_BUDGET_SECONDS = 10.0, 4.0, 2.0
RESIDENT_BUDGET_BYTES = 1.2 * GIB
PEER_RATIO_BUDGET = 1 / 4  # at least four times as fast
large_step, small_step = step_of(LARGE["vocabulary"]), step_of(SEVEN_B["vocabulary"])


class Timed(NamedTuple):
    """Wall time, and the processor's own, which a busy machine inflates less."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def timed(action: Callable[[], int]) -> Timed:
    """Run an action that returns a peak."""
    wall, cpu = time.perf_counter(), time.process_time()
    peak_bytes = action()
    return Timed(time.perf_counter() - wall, time.process_time() - cpu, peak_bytes)


def resident_bytes() -> int:
    """The most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def report_one(
    report: Report,
    benchmark: BenchmarkFixture,
    name: str,
    action: Callable[[], Measurement],
    budget_seconds: float,
) -> Measurement:
    """Run once, and print seconds and memory beside their budgets."""
    cpu = time.process_time()
    found = benchmark.pedantic(action, rounds=1)
    cpu = time.process_time() - cpu
    report(name, benchmark.stats.stats.median, budget_seconds)
    report("  processor time", cpu, budget_seconds)
    report("  memory of this process", resident_bytes(), RESIDENT_BUDGET_BYTES, "bytes")
    return found


def test_175b_whole_and_extended(benchmark: BenchmarkFixture, report: Report) -> None:
    extended = timed(
        lambda: extrapolate(large_sharded, large_step, layers=LARGE_LAYERS, world=WORLD).peak_bytes
    )
    report("175B, 64 ranks, extrapolated", extended.seconds, EXTENDED_BUDGET_SECONDS)
    report("  processor time", extended.cpu_seconds, EXTENDED_BUDGET_SECONDS)
    whole = report_one(
        report,
        benchmark,
        "175B, 64 ranks, whole",
        lambda: simulate(large_sharded, large_step, world=WORLD),
        WHOLE_BUDGET_SECONDS,
    )
    assert extended.peak_bytes == whole.peak_bytes


def test_7b_low_rank(benchmark: BenchmarkFixture, report: Report) -> None:
    report_one(
        report,
        benchmark,
        "7B LoRA",
        lambda: simulate(lambda: seven_b_adapted(False), small_step),
        ADAPTED_BUDGET_SECONDS,
    )


def test_7b_quantized(benchmark: BenchmarkFixture, report: Report) -> None:
    report_one(
        report,
        benchmark,
        "7B QLoRA",
        lambda: simulate(lambda: seven_b_adapted(True), small_step),
        ADAPTED_BUDGET_SECONDS,
    )


def tracked() -> int:
    """The peer's peak of the same step, after the same warm-up, on tensors without data."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # casting a module fails in fake mode
    try:
        return _tracked()
    finally:
        torch.set_default_dtype(before)


def _tracked() -> int:
    with FakeTensorMode():
        model = Transformer(TransformerConfig(layers=SEVEN_B_LAYERS, **SEVEN_B))
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            small_step(model, optimizer)
            tracker.reset_mod_stats()
            small_step(model, optimizer)
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_7b_full_beside_its_peer(benchmark: BenchmarkFixture, report: Report) -> None:
    """AdamW on all parameters; the CPU's kernels on both sides, as the peer knows no others."""
    peer = timed(tracked)
    ours = timed(lambda: simulate(seven_b, small_step, device="cpu").peak_bytes)
    extended = benchmark.pedantic(
        lambda: extrapolate(seven_b, small_step, layers=SEVEN_B_LAYERS, device="cpu"), rounds=1
    )
    assert extended.peak_bytes == ours.peak_bytes
    report("7B full, time / MemTracker's", ours.seconds / peer.seconds, PEER_RATIO_BUDGET, "x")
    ratio = ours.cpu_seconds / peer.cpu_seconds
    report("  processor time / MemTracker's", ratio, PEER_RATIO_BUDGET, "x")
    report("  seconds, whole", ours.seconds, peer.seconds * PEER_RATIO_BUDGET)
    report("  seconds, extrapolated", benchmark.stats.stats.median, ours.seconds)
    report("  peak, beside MemTracker's", ours.peak_bytes, peer.peak_bytes, "bytes")
