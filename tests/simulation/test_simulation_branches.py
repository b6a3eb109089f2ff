"""Which way a step goes where it asks a tensor for a truth value: checks pass, nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from branch_cases import CHECKS, WAYS, WHOLE, returned
from torch import Tensor, nn

from utils.memory import measure
from utils.memory.source import CountingSource, source_for
from utils.simulation import SimulationError, simulate
from utils.simulation.branches import GOES_ON, PASSES
from utils.simulation.stand_ins import NO_BOUND

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH = 512, 256


def build() -> Any:
    model = nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(loss: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: Any) -> None:
        loss(model(torch.randn(ROWS, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ratio(loss: Callable[[Tensor], Tensor], values: Any) -> tuple[float, tuple[str, ...]]:
    if not isinstance(source_for(torch.device("cpu")), CountingSource):
        pytest.skip("needs the counting allocator, and so a C++ compiler")
    step = step_of(loss)
    found = simulate(build, step, device="cpu", values=values)
    model, optimizer = build()
    real = measure(lambda: step(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    return found.peak_bytes / real.peak_bytes, found.notes


@pytest.mark.parametrize("values", [None, True])
@pytest.mark.parametrize("loss", CHECKS)
def test_a_check_passes_unasked(loss: Callable[[Tensor], Tensor], values: Any) -> None:
    found, notes = ratio(loss, values)
    assert found == pytest.approx(1, abs=0.002)
    assert any(PASSES in note and "branch_cases.py, line" in note for note in notes)
    assert NO_BOUND not in notes, "a check changes nothing"


@pytest.mark.parametrize("loss", WAYS)
def test_the_way_that_leaves_early_is_not_taken(loss: Callable[[Tensor], Tensor]) -> None:
    found, notes = ratio(loss, True)
    assert found == pytest.approx(1, abs=0.002)
    assert any(GOES_ON in note for note in notes) and NO_BOUND in notes


@pytest.mark.parametrize("loss", WHOLE)
def test_what_counts_is_all_of_it(loss: Callable[[Tensor], Tensor]) -> None:
    assert ratio(loss, True)[0] == pytest.approx(1, abs=0.002)


def test_a_way_that_leaves_early_is_asked_for() -> None:
    with pytest.raises(SimulationError, match="branch_cases.py, line"):
        simulate(build, step_of(returned), device="cpu")


def test_a_loop_without_an_end_is_refused() -> None:
    def endless(y: Tensor) -> Tensor:
        while (y.detach() > 1e9).any():
            y = y + 0
        return y.mean()

    with pytest.raises(SimulationError, match=r"'test_simulation_branches.py:\d+': \[1, 1, 0\]"):
        simulate(build, step_of(endless), device="cpu", values=True)


def test_an_error_after_an_assumption_says_which() -> None:
    def unlucky(y: Tensor) -> Tensor:
        if y.sum() > 3:
            int("no number")
        return y.mean()

    with pytest.raises(SimulationError, match=r"assumed at .*line \d+ .*branches.py:\d+': 0"):
        simulate(build, step_of(unlucky), device="cpu", values=True)
