"""`measure`: run a step a few times and say where its bytes were and how fast it was."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from utils.checked import asks_first
from utils.memory.arguments import refuse_known_mistakes
from utils.memory.budgets import Budget, budget
from utils.memory.device_state import (
    allocator_bytes,
    device_name,
    give_back_free_memory,
    synchronize,
)
from utils.memory.events import AllocationEvent
from utils.memory.host import noted_host_spans
from utils.memory.ledger import Observations, allocations
from utils.memory.measurement import Measurement
from utils.memory.notes import other_threads, step_notes, taken_by
from utils.memory.observer import StepObserver
from utils.memory.source import EventSource, RealMemory, rounded, source_for
from utils.memory.timeline import MemoryTimeline
from utils.memory.watched import Models, Optimizers, Watched, watched
from utils.shims.ddp import bucket_bytes
from utils.units import Evidence

Step = Callable[[], Any]
MOST_STEPS = 10_000  # each is run for real
PLACED = "; host apart by placement"  # where one memory stands for two

_measuring = threading.Lock()  # the allocator that is recorded is the whole process's


@asks_first(refuse_known_mistakes)
def measure(
    step: Step,
    *,
    model: Models,
    optimizer: Optimizers = None,
    items: int = 1,
    unit: str = "items",
    name: str = "",
    within: Budget | str | int | None = None,
    timed_steps: int = 5,
    warmup_steps: int | None = None,
    source: EventSource | None = None,
    keep: Mapping[str, Any] | None = None,
    host: Mapping[str, Any] | None = None,
) -> Measurement:
    """Measure the peak memory, its breakdown, and the speed of `step()`.

    Runs warm-up steps, one metered step and `timed_steps` steps without the meter; all of them
    are real and change the model and the optimizer.

    Args:
        step: one whole training step (or one inference), without arguments.
        model: the model that the step runs; its parameters, buffers and gradients are counted.
            Several in a list, or a dictionary of names: `{"generator": g, "discriminator": d}`.
        optimizer: the optimizer that the step uses; its state is counted. Several in a list; None
            for inference.
        items: how many items (images, tokens) one step processes, for the throughput.
        unit: what an item is called.
        within: a memory budget, or its size such as "16GB"; the step must stay inside it.
        timed_steps: how many steps are timed; 0 leaves the speed out.
        warmup_steps: how many steps run before the metered one; 0 meters the very first, in which
            the optimizer makes its state. What the model needs, one or two, if None.
        source: where allocation events come from; the best one for the model's device if None.
        keep: what else holds tensors on the device between steps, by name: `{"ema": ema}`. They
            are counted as *kept beside the model*.
        host: what lies in host memory, by category: `{"optimizer state": offloaded.inner}`, or {}.
            On a CPU, where device and host are one memory, its tensors and all that is made inside
            of `host_memory()` are then counted apart: `measurement.host`.

    Raises:
        ValueError: an argument cannot be used, or an optimizer is given and the step never
            calls backward().
        RuntimeError: another measurement is under way, in another thread or around this one.
        OverBudgetError: the step goes over the budget.
    """
    seen = watched(model, optimizer, keep, host)
    device = _checked_device(step, seen, items, timed_steps, warmup_steps)
    warmup = max(map(_warmup_steps, seen.models.values())) if warmup_steps is None else warmup_steps
    events_from = source or source_for(device)
    allowed = None if within is None else budget(within)
    limit = allowed.enforced(device) if allowed else nullcontext()
    alone = _alone() if isinstance(events_from, RealMemory) else nullcontext()
    with alone, limit, _progress(warmup + 1 + timed_steps, name) as advance:
        blocks, resident, others = _metered(step, seen, warmup, events_from, device, advance)
        timeline, beside = blocks
        if allowed is not None:
            allowed.check(timeline)
        seconds = _timed(step, timed_steps, device, advance)
    give_back_free_memory()
    return Measurement(
        name=name or seen.name,
        timeline=timeline,
        evidence=Evidence.MEASURED,
        device=device_name(device) + PLACED * (beside is not None),
        step_seconds=seconds,
        items=items,
        unit=unit,
        source=events_from.name,
        allocator_bytes=resident,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        notes=(*step_notes(timeline, seen, timed_steps + 1 + warmup), *others),
        host_timeline=beside,
    )


def _metered(
    step: Step,
    seen: Watched,
    warmup: int,
    source: EventSource,
    device: torch.device,
    advance: Callable[[], object],
) -> tuple[tuple[MemoryTimeline, MemoryTimeline | None], dict[str, int], list[str]]:
    """Warm up and meter inside one recording, so that frees of the first are seen in the second.

    The timelines of device and host, what the allocator says, and notes on what other threads took
    meanwhile.
    """
    strangers = other_threads()
    spans_on_host = noted_host_spans(source.now_ns)
    with (
        _recording(source) as events,
        spans_on_host as on_host,
        StepObserver(seen, source) as observer,
    ):
        for _ in range(warmup):
            step()
            advance()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start_ns = observer.begin_step()
        step()
        synchronize(device)
        end_ns = source.now_ns()
        observer.note_states()
        advance()
    _check_backward(observer, seen)
    sizes = [size for model in seen.models.values() for size in _bucket_bytes(model)]
    buckets = [rounded(size, source.granularity_bytes) for size in sizes]
    marks, spans, known = observer.marks, observer.spans, observer.known
    # On a GPU its own allocator knows nothing of the host.
    is_apart = device.type == "cpu" and seen.host is not None
    placed = on_host if is_apart else ()
    found = Observations(start_ns, end_ns, marks, spans, known, buckets, placed)
    blocks = allocations(events, found, source.granularity_bytes, source.existing)
    timeline, beside = (
        MemoryTimeline([b for b in blocks if b.on_host is there], marks, start_ns, end_ns)
        for there in (False, True)
    )
    others = taken_by(strangers, events, timeline)
    return (timeline, beside if is_apart else None), allocator_bytes(device), others


@contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second measurement: it would count the first one's bytes, and end its recording."""
    if not _measuring.acquire(blocking=False):
        raise RuntimeError(
            "Another measure() is under way in this process, and both would count each other's "
            "bytes. Run one after the other, and no measure() inside of a step."
        )
    try:
        yield
    finally:
        _measuring.release()


@contextmanager
def _recording(source: EventSource) -> Iterator[list[AllocationEvent]]:
    """A list that holds the events once the block is left; the source always stops."""
    events: list[AllocationEvent] = []
    source.start()
    try:
        yield events
    finally:
        events.extend(source.stop())


def _timed(
    step: Step, count: int, device: torch.device, advance: Callable[[], object]
) -> tuple[float, ...]:
    seconds = []
    for _ in range(count):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        advance()
    return tuple(seconds)


def _checked_device(
    step: Any, seen: Watched, items: int, timed_steps: int, warmup_steps: int | None
) -> torch.device:
    if not callable(step):
        raise ValueError("step must be a function without arguments that runs one training step.")
    if items < 1:
        raise ValueError(f"items= must be at least 1, the number processed per step; got {items}.")
    for name, steps in (("timed_steps", timed_steps), ("warmup_steps", warmup_steps or 0)):
        if not 0 <= steps <= MOST_STEPS:
            bound = "cannot be negative" if steps < 0 else f"can be {MOST_STEPS:,} at most"
            raise ValueError(f"{name}= {bound}; got {steps}.")
    devices = {parameter.device for parameter in seen.parameters()}
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "nowhere: it has no parameters"
        raise ValueError(f"measure() needs a model on one device; this one is on {where}.")
    return devices.pop()


def _check_backward(observer: StepObserver, seen: Watched) -> None:
    if seen.optimizers and not observer.backward_came:
        raise ValueError(
            "The step never called backward() through this model, although an optimizer was "
            "given. Call loss.backward() in the step, or leave out optimizer= for inference."
        )


def _warmup_steps(model: nn.Module) -> int:
    # DistributedDataParallel rebuilds its buckets at the start of its second step.
    return 2 if isinstance(model, nn.parallel.DistributedDataParallel) else 1


def _bucket_bytes(model: nn.Module) -> tuple[int, ...]:
    if not isinstance(model, nn.parallel.DistributedDataParallel) or model.gradient_as_bucket_view:
        return ()  # as views, the gradients tell where the buckets are
    return bucket_bytes(model)


@contextmanager
def _progress(total: int, name: str) -> Iterator[Callable[[], object]]:
    """A bar that appears only if measuring takes longer than two seconds."""
    label = f"measuring {name}".strip()
    with tqdm(total=total, desc=label, delay=2, leave=False, unit="step") as bar:
        yield bar.update
