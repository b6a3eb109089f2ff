"""Which way a step goes where it asks a tensor for a truth value: checks pass, nothing is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.memory import measure
from utils.memory.source import CountingSource, source_for
from utils.simulation import SimulationError, simulate
from utils.simulation.branches import GOES_ON, PASSES
from utils.simulation.stand_ins import NO_BOUND

Tensor = torch.Tensor
ROWS, WIDTH = 512, 256


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build() -> Any:
    model = nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(loss: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def step(model: nn.Module, optimizer: Any) -> None:
        loss(model(torch.randn(ROWS, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def is_bad(y: Tensor) -> Tensor:
    return y.isnan().any()


def raised(y: Tensor) -> Tensor:
    if y.dim() == 2 and not torch.isfinite(y).all():
        raise ValueError("not finite")
    return y.square().mean()


def by_function(y: Tensor) -> Tensor:
    if is_bad(y):
        raise ValueError("not finite")
    return y.square().mean()


def later(y: Tensor) -> Tensor:
    bad = torch.isnan(y).any().item()
    y = y.sin()
    if bad:
        raise ValueError("not finite")
    return y.square().mean()


def asserted(y: Tensor) -> Tensor:
    assert not torch.isnan(y).any() and torch.isfinite(y).all(), "not finite"
    return y.square().mean()


def at_the_end(y: Tensor) -> Tensor:
    if torch.isfinite(y).all():
        return y.square().mean()
    raise ValueError("not finite")


def skipped(y: Tensor) -> Tensor:
    for _ in range(4):
        if torch.rand(()) < 0:  # with data never, as here
            continue
        y = y.sin()
    return y.mean()


def left(y: Tensor) -> Tensor:
    for _ in range(4):
        y = y.sin()
        if y.detach().abs().max() < 1e-9:
            break
    return y.mean()


def returned(y: Tensor) -> Tensor:
    if not (y.detach() > -1e9).all():
        return y.mean()
    return (y.sin() * y.cos()).mean()


def counted(y: Tensor) -> Tensor:
    """Each choice of all that are there, by its number."""
    parts = {f"part {i}": y[:, i] for i in range(8)}
    for row in torch.ones(8).nonzero():
        y = y * parts[f"part {row[0]}"][:, None]
    return y.mean()


def assigned(y: Tensor) -> Tensor:
    mask, y = y > -1e9, y * 1
    y[mask] = y.detach()[mask] * 2
    return y.square().mean()


def distinct(y: Tensor) -> Tensor:
    numbers, inverse = torch.unique(torch.arange(y.numel()), return_inverse=True)
    return (y.flatten()[inverse] * numbers[inverse]).mean()


def heard(y: Tensor) -> Tensor:
    odds = y[:, :32].view(64, 8, 32).log_softmax(-1)
    lengths = torch.full((8,), 64), torch.full((8,), 10)
    return F.ctc_loss(odds, torch.ones(8, 10, dtype=torch.long), *lengths)


CHECKS = (raised, by_function, later, asserted, at_the_end)
WAYS = (skipped, left, returned)
WHOLE = (counted, assigned, distinct, heard)


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
    assert any(PASSES in note and "test_simulation_branches.py, line" in note for note in notes)
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
    with pytest.raises(SimulationError, match="test_simulation_branches.py, line"):
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
