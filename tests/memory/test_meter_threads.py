"""The meter in a process of several threads: one measurement at a time, and whose bytes they are."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from meter_cases import MeteredProgram, classify, mlp

from utils.memory import measure
from utils.memory.source import CountingSource


@pytest.fixture
def case() -> MeteredProgram:
    model = mlp()
    return classify(model, torch.optim.Adam(model.parameters()), torch.ones(16, 20))


@pytest.mark.parametrize("where", ["in another thread", "inside of a step"])
def test_two_measurements_at_once_are_refused(case: MeteredProgram, where: str) -> None:
    refusals = []

    def second() -> None:
        try:
            measure(mine.step, model=mine.model, timed_steps=0)
        except RuntimeError as refusal:
            refusals.append(str(refusal))

    def step() -> None:
        if where == "inside of a step":
            second()
        else:
            other = threading.Thread(target=second)
            other.start()
            other.join()
        case.step()

    model = mlp()
    mine = classify(model, torch.optim.Adam(model.parameters()), torch.ones(16, 20))
    how = {"model": case.model, "optimizer": case.optimizer, "timed_steps": 0}
    alone = measure(case.step, **how)
    found = measure(step, **how)
    assert len(refusals) == 2 and all("Run one after the other" in text for text in refusals)
    assert dict(found.breakdown) == dict(alone.breakdown)
    assert measure(mine.step, model=model, timed_steps=0).peak_bytes > 0


@pytest.fixture
def neighbour() -> Iterator[Callable[[], None]]:
    """A thread of the notebook that takes 1,000,000 bytes whenever it is asked to."""
    asked, answered, kept = queue.Queue(), queue.Queue(), []

    def work() -> None:
        while asked.get():
            kept.append(torch.ones(250_000))
            answered.put(True)

    def take() -> None:
        asked.put(True)
        answered.get()

    thread = threading.Thread(target=work, name="my loader")
    thread.start()
    yield take
    asked.put(False)
    thread.join()


def test_what_another_thread_takes_is_said(
    case: MeteredProgram, neighbour: Callable[[], None]
) -> None:
    def step() -> None:
        case.step()
        neighbour()

    how = {"model": case.model, "optimizer": case.optimizer, "timed_steps": 0}
    quiet = measure(case.step, **how, source=CountingSource())
    found = measure(step, **how, source=CountingSource())
    said = [note for note in found.notes if "my loader" in note]
    assert len(said) == 1 and "976.56 KiB" in said[0] and "counted" in said[0].lower()
    assert not any("thread" in note for note in quiet.notes)


def test_threads_of_the_step_are_part_of_it(case: MeteredProgram) -> None:
    def step() -> None:
        worker = threading.Thread(target=lambda: torch.ones(1000))
        worker.start()
        worker.join()
        case.step()

    found = measure(step, model=case.model, optimizer=case.optimizer, timed_steps=0)
    assert not any("thread" in note for note in found.notes)
