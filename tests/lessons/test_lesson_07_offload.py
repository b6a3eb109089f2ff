"""Offloaded optimizers: the plain one's numbers to the bit, and where the bytes are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evidence.validation.simulation_cpu import BATCH, LENGTH, TINY, cross_entropy, train
from utils.lessons.lesson_07.offload import OffloadedOptimizer
from utils.lessons.lesson_07.offload_choice import OffloadItem, best_offload
from utils.memory import Category, measure
from utils.models import Transformer
from utils.simulation import simulate
from utils.units import MIB

Make = Callable[..., torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "AdamW": torch.optim.AdamW,
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
}


def build(make: Make, offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(TINY)
    optimizer = make(model.parameters())
    return model, OffloadedOptimizer(optimizer) if offload else optimizer


def losses(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        tokens = torch.randint(TINY.vocabulary, (BATCH, LENGTH))
        loss = cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_losses_and_weights_are_the_plain_optimizers_to_the_bit(name: str) -> None:
    plain, offloaded = (build(MAKERS[name], offload) for offload in (False, True))
    assert losses(*plain) == losses(*offloaded)
    for one, other in zip(plain[0].parameters(), offloaded[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_schedule_reaches_the_inner_optimizer() -> None:
    found = []
    for offload in (False, True):
        model, optimizer = build(torch.optim.AdamW, offload)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        for _ in range(3):
            losses(model, optimizer, 1)
            schedule.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_states_are_saved_and_loaded() -> None:
    model, optimizer = build(torch.optim.AdamW, True)
    losses(model, optimizer)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = Transformer(TINY)
    again.load_state_dict(weights)
    resumed = OffloadedOptimizer(torch.optim.AdamW(again.parameters()))
    resumed.load_state_dict(saved)
    assert losses(again, resumed) == losses(model, optimizer)


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = OffloadedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    used.grad = torch.ones(3)
    optimizer.step()
    assert used.tolist() == [0.0, 0.0, 0.0]
    assert unused.tolist() == [1.0, 1.0, 1.0]


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model, optimizer = build(torch.optim.AdamW, False)
    losses(model, optimizer, 1)
    with pytest.raises(ValueError, match="before the first step"):
        OffloadedOptimizer(optimizer)


def test_on_a_simulated_gpu_states_and_copies_are_the_hosts() -> None:
    """Device: parameters and gradients. Host: a copy of both and AdamW's two moments, in fp32."""
    size = 4 * sum(p.numel() for p in Transformer(TINY).parameters())
    plain, offloaded = (
        simulate(functools.partial(build, torch.optim.AdamW, offload), train, device="A100 80GB")
        for offload in (False, True)
    )
    at_rest = [int(found.timeline.alive_bytes[-1]) for found in (plain, offloaded)]
    assert at_rest[0] - at_rest[1] == pytest.approx(2 * size, rel=0.01)
    assert Category.OPTIMIZER_STATE not in categories(offloaded)
    assert plain.host_bytes == 0
    assert 4 * size <= offloaded.host_bytes <= 4 * size + MIB
    assert offloaded.reserved_bytes < plain.reserved_bytes


def test_on_a_cpu_simulated_and_measured_agree_and_nothing_is_saved() -> None:
    make = functools.partial(build, torch.optim.AdamW, True)
    simulated = simulate(make, train, device="cpu")
    model, optimizer = make()
    real = measure(lambda: train(model, optimizer), model=model, optimizer=optimizer, timed_steps=0)
    plain = simulate(functools.partial(build, torch.optim.AdamW, False), train, device="cpu")
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    assert simulated.peak_bytes >= plain.peak_bytes
    assert simulated.host_bytes is None


def leaving(make: Make = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    """In fp32 and gradients gone as they are made."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    return model, OffloadedOptimizer(make(model.parameters()), gradients_leave=True)


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_that_leave_change_no_number(name: str) -> None:
    plain, offloaded = build(MAKERS[name], False), leaving(MAKERS[name])
    assert losses(*plain) == losses(*offloaded)
    assert all(parameter.grad is None for parameter in offloaded[0].parameters())
    for one, other in zip(plain[0].parameters(), offloaded[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_that_leave_are_added_up_and_dropped() -> None:
    one = nn.Parameter(torch.ones(2))
    optimizer = OffloadedOptimizer(torch.optim.SGD([one], lr=1.0), gradients_leave=True)
    for _ in range(2):
        (2 * one).sum().backward()
    (copy,) = optimizer.inner.param_groups[0]["params"]
    assert one.grad is None and copy.grad.tolist() == [4.0, 4.0]
    optimizer.zero_grad()
    assert copy.grad is None
    one.sum().backward()
    optimizer.step()
    assert one.tolist() == [0.0, 0.0]


def test_a_master_copy_in_fp32_beside_16_bits() -> None:
    """Steps too small for bf16 add up in the master copy."""
    one = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer(torch.optim.SGD([one], lr=1e-3), master_dtype=torch.float32)
    for _ in range(8):
        one.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step()
    (copy,) = optimizer.inner.param_groups[0]["params"]
    assert copy.dtype is torch.float32 and copy.item() == pytest.approx(1 - 8e-3)
    assert one.item() == torch.tensor(1 - 8e-3).bfloat16().item() < 1


def test_on_a_simulated_gpu_two_bytes_a_parameter_stay() -> None:
    """In bf16, with gradients that leave; the host has 16: copy, gradient and two moments in fp32."""
    count = sum(p.numel() for p in Transformer(TINY).parameters())

    def in_16_bits() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Transformer(TINY).to(torch.bfloat16)
        inner = torch.optim.AdamW(model.parameters())
        how = {"gradients_leave": True, "master_dtype": torch.float32}
        return model, OffloadedOptimizer(inner, **how)

    found = simulate(in_16_bits, train, device="A100 80GB")
    largest = max(p.numel() for p in Transformer(TINY).parameters())
    kept = found.timeline.at(found.timeline.end_ns)
    assert kept.total_bytes - kept[Category.OTHER] == pytest.approx(2 * count, rel=0.02)
    assert Category.GRADIENTS not in categories(found)  # each is gone before the next: temporaries
    assert Category.OPTIMIZER_STATE not in categories(found)
    assert 16 * count <= found.host_bytes <= 16 * count + 4 * largest + MIB


def categories(found: Any) -> set[Category]:
    return {block.category for block in found.timeline.allocations}


def test_a_choice_at_both_limits_is_allowed() -> None:
    items = [OffloadItem("one", 4, 4, 0, 0), OffloadItem("two", 6, 6, 0, 0)]
    assert best_offload(items, 4, 6, 1.0, 1.0) == {1}
    with pytest.raises(ValueError, match="No choice fits"):
        best_offload(items, 4, 5, 1.0, 1.0)
