"""Device and host told apart by placement: exact bytes, by category, on a machine with one memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from evidence.validation.simulation_cpu import TINY, train
from utils.lessons.lesson_07.offload import OffloadedOptimizer
from utils.memory import Category, Measurement, host_memory, measure
from utils.models import Transformer

TENSORS = len(list(Transformer(TINY).parameters()))
SIZE = 4 * sum(p.numel() for p in Transformer(TINY).parameters())


def offloaded(leave: bool) -> Measurement:
    model = Transformer(TINY)
    optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), gradients_leave=leave)
    return measure(
        lambda: train(model, optimizer),
        model=model,
        optimizer=optimizer,
        timed_steps=0,
        host={"optimizer state": optimizer.inner},
    )


@pytest.mark.parametrize("leave", [False, True])
def test_an_offloaded_optimizer_by_category(leave: bool) -> None:
    found = offloaded(leave)
    device = found.timeline.at(found.timeline.end_ns)
    host = found.host.timeline.at(found.host.timeline.end_ns)
    assert device[Category.PARAMETERS] == SIZE, "the weights stay on the device"
    assert device[Category.OPTIMIZER_STATE] == 0, "no state stays there"
    assert host[Category.OPTIMIZER_STATE] - 3 * SIZE == 4 * TENSORS, (
        "copies, two moments, and step counts"
    )
    # `train` drops gradients at its end: the host's as well where they have left in backward.
    assert host[Category.GRADIENTS] == (0 if leave else SIZE), "the copies' gradients"
    assert found.host.peak_bytes >= 4 * SIZE, "copies, gradients and two moments at the step"
    assert host[Category.KEPT] == 0, "copies are states, not another model's weights"
    assert found.host_bytes == found.host.peak_bytes >= host.total_bytes
    assert "host apart by placement" in found.device, "a figure has to say so"
    assert not any("was not named" in note for note in found.notes), "the copies are known"


def test_categories_add_up_on_both_sides() -> None:
    found = offloaded(True)
    for side in (found, found.host):
        series = side.timeline.series()
        assert (sum(series.values()) == side.timeline.alive_bytes).all(), (
            "every byte has one category"
        )


def test_what_a_step_makes_on_the_host_counts_there_from_any_thread() -> None:
    model, kept = nn.Linear(8, 8), []

    def to_host() -> None:
        with host_memory():
            kept.append(torch.ones(1000))

    def step() -> None:
        kept.clear()
        here = torch.ones(500)
        worker = threading.Thread(target=to_host)
        worker.start()
        to_host()
        worker.join()
        model(torch.ones(1, 8)).sum().backward()
        del here

    found = measure(step, model=model, timed_steps=0, host={})
    assert found.host_bytes == 8000, "two tensors of 1,000 floats"
    assert found.peak_bytes < 8000, "none of them on the device"
    with pytest.raises(ValueError, match="by category"):
        _ = measure(lambda: model(torch.ones(1, 8)), model=model, timed_steps=0).host


def test_unless_asked_nothing_is_told_apart() -> None:
    model, kept = nn.Linear(8, 8), []

    def step() -> None:
        with host_memory():
            kept[:] = [model(torch.ones(1, 8)), torch.ones(1000)]

    found = measure(step, model=model, timed_steps=0)
    assert found.peak_bytes > 4000, "on a CPU host memory is memory"
    assert found.host_timeline is None and found.host_bytes is None
    assert "placement" not in found.device


def test_host_names_categories() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="by category"):
        measure(lambda: None, model=model, host={"my optimizer": model})
