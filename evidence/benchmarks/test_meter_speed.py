"""What metering a step costs: the same step bare and metered, in turns, within one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from utils.memory.events import Mark
from utils.memory.ledger import Observations, allocations
from utils.memory.observer import StepObserver
from utils.memory.source import CountingSource, EventSource, ProfilerSource
from utils.memory.timeline import MemoryTimeline
from utils.memory.watched import watched
from utils.models import resnet

from .conftest import Report

BATCH, ROUNDS, METERED_BUDGET = 32, 5, 1.3


class Training(NamedTuple):
    """A model, its optimizer and one step of its training."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    images: torch.Tensor
    step: Callable[[], None]


class Seconds(NamedTuple):
    """The step itself, and what the meter does before and after it."""

    step: float
    around: float = 0.0


def training() -> Training:
    """ResNet-50 with the CIFAR stem, batch 32."""
    model = resnet(50, stem="cifar")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH) % 10

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Training(model, optimizer, images, step)


def seconds_of(action: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bare(case: Training) -> Seconds:
    return Seconds(seconds_of(case.step))


def metered(case: Training, source: EventSource) -> Seconds:
    """The step as `measure` runs it: source recording, observer open, then the analysis."""
    began = time.perf_counter()
    source.start()
    with StepObserver(watched(case.model, case.optimizer, None), source) as observer:
        start_ns = observer.begin_step()
        step = seconds_of(case.step)
        end_ns = source.now_ns()
        observer.note_states()
    marks: list[Mark] = observer.marks
    seen = Observations(start_ns, end_ns, marks, observer.spans, observer.known)
    blocks = allocations(source.stop(), seen, source.granularity_bytes)
    peak = MemoryTimeline(blocks, marks, start_ns, end_ns).peak
    assert peak.total_bytes > 0
    return Seconds(step, time.perf_counter() - began - step)


def tracked(case: Training) -> Seconds:
    """The peer: PyTorch's private MemTracker."""
    began = time.perf_counter()
    tracker = MemTracker()
    tracker.track_external(case.model, case.optimizer, case.images)
    with tracker:
        step = seconds_of(case.step)
    return Seconds(step, time.perf_counter() - began - step)


def test_metered_step_against_bare_step(report: Report) -> None:
    case = training()
    ways: dict[str, Callable[[], Seconds]] = {
        "bare": lambda: bare(case),
        "counting allocator": lambda: metered(case, CountingSource()),
        "torch.profiler": lambda: metered(case, ProfilerSource()),
        "peer: MemTracker": lambda: tracked(case),
    }
    case.step()  # the first step makes the optimizer's state
    rows: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            gc.collect()  # what one way leaves behind is not charged to the next
            rows[name].append(way())
    bare_steps = [row.step for row in rows.pop("bare")]
    for name, seconds in rows.items():
        step = _ratio([row.step for row in seconds], bare_steps)
        whole = _ratio([row.step + row.around for row in seconds], bare_steps)
        report(f"ResNet-50 step, {name}", step, METERED_BUDGET, "x")
        report("  with what is done around it", whole, METERED_BUDGET, "x")


def _ratio(seconds: list[float], bare_steps: list[float]) -> float:
    """The median over rounds: a machine that is busy for a while slows both of a pair."""
    pairs = zip(seconds, bare_steps, strict=True)
    return statistics.median(one / bare_step for one, bare_step in pairs)
