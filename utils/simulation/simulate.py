"""`simulate`: the learner's own model and step, on tensors without data, metered as ever."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from utils.memory.budget import Budget
from utils.memory.measurement import Measurement
from utils.memory.meter import measure
from utils.simulation.devices import SimulatedDevice, simulated_device
from utils.simulation.kernels import CudaChoices, choose_optimizer_kernel
from utils.simulation.patches import patched
from utils.simulation.watcher import StorageWatcher
from utils.units import Evidence

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer | None]]
Step = Callable[[nn.Module, Any], Any]


def simulate(
    build: Build,
    step: Step,
    *,
    device: str = "cpu",
    items: int = 1,
    unit: str = "items",
    name: str = "",
    within: Budget | None = None,
) -> Measurement:
    """Simulate one training step of any size, without its memory.

    Args:
        build: returns (model, optimizer); the same function that a real run calls.
        step: takes (model, optimizer) and runs one whole step.
        device: "cpu", or a GPU of the catalog.
        within: a memory budget to stay inside.
    """
    card = simulated_device(device)
    watcher = StorageWatcher(card.granularity_bytes)
    with _simulating(watcher, card):
        model, optimizer = build()
        if card.is_cuda:
            choose_optimizer_kernel(optimizer)
        result = measure(
            lambda: step(model, optimizer), model=model, optimizer=optimizer, items=items,
            unit=unit, name=name, within=within, timed_steps=0, source=watcher,
        )  # fmt: skip
        del model, optimizer
    return dataclasses.replace(
        result, evidence=Evidence.SIMULATED, device=card.name, allocator_bytes={}, notes=()
    )


@contextlib.contextmanager
def _simulating(watcher: StorageWatcher, card: SimulatedDevice) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(watcher)
        stack.enter_context(patched(watcher))
        if card.is_cuda:
            stack.enter_context(CudaChoices(card.flash))
        yield
