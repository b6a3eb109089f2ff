"""What checkpointing saves and costs, what it refuses to repeat, and the best set of blocks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_checkpointing import POLICIES, same_bits
from torch import nn
from torch.utils.checkpoint import CheckpointError

from evidence.validation.simulation_cpu import both
from utils.lessons.lesson_05.block_choice import (
    BlockCost,
    activation_peak,
    best_blocks,
    block_costs,
    recompute_flops,
)
from utils.lessons.lesson_05.repeatable import (
    NotRepeatableError,
    check_repeatable,
    recompute_explained,
)
from utils.memory import Category, measure
from utils.models import Transformer, TransformerConfig, UNet
from utils.techniques import checkpoint_blocks, in_segments

WIDE = TransformerConfig(vocabulary=64, hidden=128, layers=6, heads=4, feedforward=352)


def step(model: nn.Module, optimizer: Any) -> None:
    tokens = torch.randint(64, (4, 128))
    optimizer.zero_grad()
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def wide(policy: dict[str, Any], segment: int = 0) -> Callable[[], Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Transformer(WIDE)
        if segment:
            model.blocks = in_segments(model.blocks, segment)
        checkpoint_blocks(model, **policy)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return build


@functools.cache
def peaks() -> dict[str, tuple[int, int]]:
    """Simulated and measured peak of each policy."""
    cases = {
        name: (POLICIES[name], 0) for name in ("none", "every 2nd", "every block", "selective")
    }
    cases["segments of 3"] = ({}, 3)
    pairs = {name: both(wide(*case), step) for name, case in cases.items()}
    return {name: (sim.peak_bytes, real.peak_bytes) for name, (sim, real) in pairs.items()}


@pytest.mark.parametrize(
    "policy", ["none", "every 2nd", "every block", "selective", "segments of 3"]
)
def test_measured_equals_simulated(policy: str) -> None:
    simulated, measured = peaks()[policy]
    assert simulated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("kind", [0, 1])
def test_peaks_are_ordered_as_stated(kind: int) -> None:
    found = {name: pair[kind] for name, pair in peaks().items()}
    assert found["every block"] < found["every 2nd"] < found["none"]
    assert found["every block"] < found["selective"] < found["none"]
    assert found["every block"] < found["segments of 3"] < found["none"]


def test_checkpointing_tiny_layers_raises_the_peak() -> None:
    def peak(every: int) -> int:
        layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]
        model = nn.Sequential(*layers)
        checkpoint_blocks(model, every=every)
        x = torch.randn(2048, 64)
        return measure(lambda: model(x).sum().backward(), model=model, timed_steps=0).peak_bytes

    assert peak(1) > 1.3 * peak(0)


# What does not repeat ---------------------------------------------------------------------------


class Drifting(nn.Module):
    """Adds how often it ran: other values of the same shape in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sin() * self.calls


class Branching(Drifting):
    """Does more from the second call on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sin() if self.calls == 1 else x[..., :1].sin()


def test_torch_does_not_see_other_values_and_the_check_does() -> None:
    torch.manual_seed(0)  # values that a ReLU lets through: zeros would not drift
    block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Drifting()))
    model = checkpoint_blocks([copy.deepcopy(block)])[0]
    model(torch.randn(2, 4)).square().sum().backward()  # wrong gradients, and no error
    with pytest.raises(NotRepeatableError, match=r"its part '1.1' gives other values"):
        check_repeatable(block, torch.randn(2, 4))


def test_torch_s_own_check_is_explained() -> None:
    model = checkpoint_blocks([nn.Sequential(nn.Linear(4, 4), Branching())])[0]
    loss = model(torch.randn(2, 4)).square().sum()
    with (
        pytest.raises(NotRepeatableError, match="Look for a branch") as caught,
        recompute_explained(),
    ):
        loss.backward()
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_a_part_that_gives_another_shape() -> None:
    with pytest.raises(NotRepeatableError, match=r"gives \[\(\(2, 1\)"):
        check_repeatable(Branching(), torch.randn(2, 4))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.Dropout(0.5)])
def test_what_repeats_passes_and_is_left_as_it_was(norm: nn.Module) -> None:
    block = nn.Sequential(nn.Linear(4, 4), norm)
    before, state = copy.deepcopy(block.state_dict()), torch.get_rng_state()
    check_repeatable(block, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert same_bits(list(before.values()), list(block.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state())


# The choice of blocks ---------------------------------------------------------------------------


def brute_force(costs: list[BlockCost], limit: int) -> int | None:
    sets = [[i for i in range(len(costs)) if n >> i & 1] for n in range(2 ** len(costs))]
    fits = [recompute_flops(costs, s) for s in sets if activation_peak(costs, s) <= limit]
    return min(fits, default=None)


def test_the_choice_equals_brute_force() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(30):
        sizes = torch.randint(1, 60, (8, 3), generator=draw).tolist()
        costs = [BlockCost(*row) for row in sizes]
        for share in (0.55, 0.7, 0.9):
            limit = int(share * activation_peak(costs, ()))
            wanted = brute_force(costs, limit)
            if wanted is None:
                with pytest.raises(ValueError, match="cannot be reached"):
                    best_blocks(costs, limit)
            else:
                chosen = best_blocks(costs, limit)
                assert recompute_flops(costs, chosen) == wanted
                assert activation_peak(costs, chosen) <= limit


def test_the_last_block_is_never_worth_it() -> None:
    costs = [BlockCost(1, 10, 5), BlockCost(1, 10, 5), BlockCost(1, 10, 1)]
    assert activation_peak(costs, {2}) == activation_peak(costs, ())
    assert 2 not in best_blocks(costs, 23)


def test_costs_predict_what_the_meter_finds() -> None:
    """Activations of a U-Net under several choices, against their maximum in the timeline."""
    model, images, steps = UNet((16, 32, 32)), torch.randn(8, 3, 32, 32), torch.arange(8)
    costs = block_costs(model, images, steps)
    assert len(costs) == 5
    plain_peak = None
    for chosen in (set(), {0}, {0, 1}, {0, 1, 2, 3}):
        checkpoint_blocks(model, only=chosen)

        def run() -> None:
            model.zero_grad()
            model(images, steps).square().mean().backward()

        found = measure(run, model=model, timed_steps=0)
        curve = found.timeline.series()
        total = sum(curve.get(c, 0) for c in (Category.ACTIVATIONS, Category.RECOMPUTED))
        measured = int(total.max())
        predicted = activation_peak(costs, chosen)
        if plain_peak is None:
            plain_peak = measured - predicted
        assert measured - plain_peak == pytest.approx(predicted, rel=0.12), chosen


def test_costs_of_a_block_that_did_not_run() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.blocks = [model[0], nn.ReLU()]
    with pytest.raises(ValueError, match="Block 1 did not run"):
        block_costs(model, torch.ones(1, 2))
