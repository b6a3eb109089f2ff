"""A simulated step against the same step on the CPU's counting allocator, and bad input."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evidence.validation.simulation_cpu import (
    BATCH,
    CASES,
    LENGTH,
    TINY,
    both,
    cross_entropy,
    state_maxima,
)
from utils.memory import Category
from utils.models import Transformer
from utils.simulation import SimulationError, simulate
from utils.units import MIB, Evidence

pytestmark = pytest.mark.usefixtures("one_thread", "counting")

TOTAL = 0.01  # relative; most cases are equal to the byte


# A ResNet-50's real step takes seconds. Optimizers are told apart on transformers.
QUICK = {"ResNet-50, SGD", "ResNet-50, AdamW foreach", "ResNet-50, autocast bf16"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] if "ResNet-50" in name and name not in QUICK else []
        )
        for name in CASES
    ],
)
def test_simulated_is_what_the_allocator_counts(name: str) -> None:
    simulated, real = both(*CASES[name])
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=TOTAL)
    assert state_maxima(simulated) == state_maxima(real)
    assert simulated.breakdown.total_bytes == simulated.peak_bytes
    assert simulated.evidence is Evidence.SIMULATED


def test_the_first_steps_are_equal_to_the_byte() -> None:
    """Where no kernel has memory of its own, nothing is left to explain."""
    for name in ("transformer, SGD", "transformer, Adam", "transformer, autocast bf16"):
        simulated, real = both(*CASES[name])
        assert simulated.breakdown == real.breakdown


def test_a_quantized_model_is_as_small_as_its_arithmetic() -> None:
    build, step = CASES["transformer, NF4"]
    found = simulate(build, step, device="cpu")
    h, f, layers, rank = TINY.hidden, TINY.feedforward, TINY.layers, 8
    linear = layers * (4 * h * h + 3 * h * f)
    norms = (2 * layers + 1) * h
    adapters = layers * 2 * rank * 2 * h
    plain = 2 * TINY.vocabulary * h + norms
    parameters = linear // 2 + 2 * plain + 4 * adapters
    assert state_maxima(found)[Category.PARAMETERS] == parameters
    assert state_maxima(found)[Category.BUFFERS] == linear // 64 * 4


class Reads(nn.Module):
    """Asks for a value, in one of the ways that learners do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * self.weight
        if self.how == "item":
            out = out * out.sum().item()
        elif self.how == "branch" and out.sum() > 0:
            out = -out
        elif self.how == "shape":
            out = out[out > 0]
        return out


class Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.head = Reads(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def run(model: nn.Module, _: Any) -> None:
    model(torch.ones(4)).sum().backward()


@pytest.fixture
def next_one_works() -> Iterator[None]:
    """Whatever went wrong before, the next simulation works."""
    yield
    assert simulate(lambda: (Outer(""), None), run, device="cpu").peak_bytes > 0
    assert torch.ones(3).sum().item() == 3.0


@pytest.mark.usefixtures("next_one_works")
@pytest.mark.parametrize("how", ["item", "branch", "shape"])
def test_a_value_that_is_asked_for_is_named_with_its_module(how: str) -> None:
    with pytest.raises(SimulationError, match=r"'head' asks for the value.*simulated tensors have"):
        simulate(lambda: (Outer(how), None), run, device="cpu")


@pytest.mark.usefixtures("next_one_works")
def test_a_value_in_the_step_is_outside_of_any_module() -> None:
    def step(model: nn.Module, _: Any) -> float:
        return model(torch.ones(4)).sum().item()

    with pytest.raises(SimulationError, match=r"outside of any module.*\.item\(\)"):
        simulate(lambda: (Outer(""), None), step, device="cpu")


@pytest.mark.usefixtures("next_one_works")
def test_an_operation_without_a_simulated_form() -> None:
    @torch.library.custom_op("simulation_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Opaque(Reads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return opaque(x) * self.weight

    with pytest.raises(SimulationError, match=r"operation that cannot be simulated.*opaque"):
        simulate(lambda: (Opaque(""), None), run, device="cpu")


@pytest.mark.usefixtures("next_one_works")
def test_a_model_on_real_data_is_refused() -> None:
    model = Outer("")
    with pytest.raises(ValueError, match=r"'head.weight' holds real data.*inside build\(\)"):
        simulate(lambda: (model, None), run, device="cpu")


@pytest.mark.usefixtures("next_one_works")
def test_real_inputs_are_refused() -> None:
    real = torch.ones(4)

    def step(model: nn.Module, _: Any) -> None:
        model(real).sum().backward()

    with pytest.raises(SimulationError, match=r"before the simulation and holds real data"):
        simulate(lambda: (Outer(""), None), step, device="cpu")


@pytest.mark.usefixtures("next_one_works")
def test_a_simulation_inside_another() -> None:
    def step(model: nn.Module, _: Any) -> None:
        simulate(lambda: (Outer(""), None), run, device="cpu")

    with pytest.raises(ValueError, match=r"cannot run inside another"):
        simulate(lambda: (Outer(""), None), step, device="cpu")


@pytest.mark.usefixtures("next_one_works")
def test_an_unknown_device_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"RTX 4090"):
        simulate(lambda: (Outer(""), None), run, device="RTX 409")


@pytest.mark.usefixtures("next_one_works")
def test_build_must_return_a_model() -> None:
    with pytest.raises(ValueError, match=r"build\(\) must return"):
        simulate(lambda: (None, None), run, device="cpu")  # type: ignore[arg-type,return-value]


@pytest.mark.usefixtures("next_one_works")
def test_an_error_of_the_learners_own_passes_through() -> None:
    def step(model: nn.Module, _: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(lambda: (Outer(""), None), step, device="cpu")


def test_inference_keeps_no_gradients() -> None:
    def step(model: nn.Module, _: Any) -> None:
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        with torch.no_grad():
            cross_entropy(model(tokens), tokens)

    simulated, real = both(lambda: (Transformer(TINY), None), step)
    assert simulated.breakdown == real.breakdown
    assert simulated.breakdown[Category.GRADIENTS] == 0


def test_a_shape_error_is_one_error_and_no_log(caplog):
    """PyTorch logs the stack of the very error that it raises: fifteen lines before it."""

    def wrong(model, optimizer):
        model(torch.ones(2, 5)).sum().backward()

    with pytest.raises(RuntimeError, match=r"same reduction dim, but got \[2, 5\] X \[4, 4\]"):
        simulate(lambda: (nn.Linear(4, 4), None), wrong)
    assert caplog.records == []


def test_the_collector_of_cycles_is_as_before_come_what_may() -> None:
    frozen: list[int] = []

    def build() -> tuple[nn.Module, None]:
        return nn.Linear(64, 64), None

    def step(model: nn.Module, _: object) -> None:
        frozen.append(gc.get_freeze_count())
        model(torch.ones(1, 64)).sum().backward()

    def fails(model: nn.Module, _: object) -> None:
        raise RuntimeError("the learner's own")

    before = gc.get_freeze_count()
    found = simulate(build, step)
    with pytest.raises(RuntimeError, match="the learner's own"):
        simulate(build, fails)
    assert min(frozen) > before == gc.get_freeze_count() == 0
    gc.freeze()
    try:  # a program's own is left alone
        mine = gc.get_freeze_count()
        assert simulate(build, step).peak_bytes == found.peak_bytes
        assert gc.get_freeze_count() == pytest.approx(mine, rel=0.01)
    finally:
        gc.unfreeze()


def test_a_tensor_that_only_a_cycle_holds_dies_as_in_a_real_program() -> None:
    class Node:
        def __init__(self, size: int) -> None:
            self.me, self.tensor = self, torch.empty(size)

    def step(model: nn.Module, _: object) -> None:
        for _ in range(4):
            Node(MIB)
            gc.collect()
        model(torch.ones(1, 64)).sum().backward()

    found = simulate(lambda: (nn.Linear(64, 64), None), step)
    ours = found.peak_bytes - found.breakdown[Category.OTHER]
    assert 4 * MIB < ours < 8 * MIB, "one at a time"
