"""The replayed caching allocator, against sizes worked out by hand from its rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from utils.memory import Category, OverBudgetError
from utils.simulation import simulate
from utils.simulation.cuda_allocator import CachingAllocator, replayed
from utils.simulation.devices import simulated_device
from utils.units import GIB, MIB, format_bytes

KIB = 1024


@pytest.mark.parametrize(
    ("wanted", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB would remain: too little to split off
    ],
)
def test_segments_and_blocks(wanted: int, reserved: int, allocated: int) -> None:
    found = replayed([], [(0, 1, wanted)])
    assert found.reserved_bytes == reserved
    assert found.allocated_bytes == allocated


def test_small_requests_share_a_segment() -> None:
    found = replayed([(n, 512 * KIB) for n in range(4)], [])
    assert found.reserved_bytes == 2 * MIB
    assert replayed([(n, 512 * KIB) for n in range(5)], []).reserved_bytes == 4 * MIB


def test_a_freed_block_is_used_again() -> None:
    found = replayed([], [(0, 1, 16 * MIB), (1, 1, -16 * MIB), (2, 2, 16 * MIB)])
    assert found.reserved_bytes == 16 * MIB


def test_the_smallest_block_that_holds_it_is_taken() -> None:
    cache = CachingAllocator()
    for address, size in enumerate((40, 12, 20)):
        cache.allocate(address, size * MIB)
    for address in range(3):
        cache.release(address)
    cache.allocate(9, 12 * MIB)
    cache.allocate(10, 40 * MIB)  # the segment of 40 MiB is still whole
    assert cache.reserved_bytes == 72 * MIB


def test_gaps_are_reserved_and_not_allocated() -> None:
    """Every other block of eight of 5 MiB is freed; 10 MiB then find no room in the gaps."""
    cache = replayed([(n, 5 * MIB) for n in range(8)], [(n, n, -5 * MIB) for n in (0, 2, 4, 6)])
    assert (cache.reserved_bytes, cache.allocated_bytes) == (40 * MIB, 20 * MIB)
    cache.allocate(9, 10 * MIB)
    assert (cache.reserved_bytes, cache.allocated_bytes) == (50 * MIB, 30 * MIB)


def test_free_neighbours_merge() -> None:
    cache = replayed([(n, 5 * MIB) for n in range(4)], [(n, n, -5 * MIB) for n in (0, 1, 3, 2)])
    cache.allocate(9, 20 * MIB)
    assert cache.reserved_bytes == 20 * MIB


def test_a_full_device_first_gives_back_what_is_wholly_free() -> None:
    cache = CachingAllocator(capacity_bytes=40 * MIB, history=[])
    cache.allocate(1, 30 * MIB)
    cache.release(1)
    cache.allocate(2, 36 * MIB)  # the free segment of 30 goes back to the driver
    assert (cache.reserved_bytes, cache.reserved_peak_bytes) == (36 * MIB, 36 * MIB)
    assert [act.action for act in cache.history or ()] == [
        "segment_alloc",
        "alloc",
        "free_completed",
        "segment_free",
        "segment_alloc",
        "alloc",
    ]


def test_a_pinned_segment_cannot_be_given_back() -> None:
    cache = CachingAllocator(capacity_bytes=40 * MIB)
    cache.allocate(1, 30 * MIB)
    cache.release(1)
    cache.allocate(2, 2 * MIB)  # lies in the segment of 30 now
    with pytest.raises(OverBudgetError, match=r"28\.00 MiB are reserved but unallocated"):
        cache.allocate(3, 29 * MIB)
    assert cache.segments == {0: 30 * MIB}
    assert cache.layout() == [(0, 2 * MIB, 2), (2 * MIB, 28 * MIB, None)]


def test_empty_cache_keeps_what_is_in_use() -> None:
    cache = replayed([(n, 12 * MIB) for n in range(3)], [(0, 1, -12 * MIB)])
    cache.empty_cache()
    assert (cache.reserved_bytes, cache.allocated_bytes) == (24 * MIB, 24 * MIB)


def test_an_address_taken_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="taken twice"):
        replayed([(1, 512)], [(0, 1, 512)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30 * MIB)), max_size=60))
def test_reserved_holds_allocated_holds_what_was_asked_for(steps: list[tuple[int, int]]) -> None:
    cache, alive = CachingAllocator(), {}
    for address, size in steps:
        if address in alive:
            cache.release(address)
            del alive[address]
        else:
            cache.allocate(address, size)
            alive[address] = size
        assert cache.reserved_bytes >= cache.allocated_bytes >= sum(alive.values())
    for address in alive:
        cache.release(address)
    assert cache.allocated_bytes == 0


def test_a_simulated_gpu_says_what_it_reserves_and_a_cpu_does_not() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        return model, torch.optim.SGD(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.zeros(64, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = simulate(build, step, device="A100 80GB")
    assert found.reserved_bytes is not None
    assert found.reserved_bytes % (2 * MIB) == 0
    assert found.reserved_bytes >= found.allocator_bytes["allocated peak"] >= found.peak_bytes
    assert simulate(build, step, device="cpu").reserved_bytes is None


def test_what_dtensor_makes_to_learn_shapes_is_no_memory() -> None:
    """FSDP's first step asks for the whole shapes of the optimizer's state, by whole stand-ins."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        mesh = init_device_mesh("cpu", (8,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.zeros(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = simulate(build, step, device="A100 80GB", world=8)
    shard = 2 * (1024 * 1024 + 1024) * 4 // 8
    kept = found.timeline.alive_bytes[-1] - found.breakdown[Category.OTHER]
    assert kept == pytest.approx(3 * shard, rel=0.02)
    allocated = found.allocator_bytes["allocated peak"]
    assert found.peak_bytes <= allocated <= found.peak_bytes + 4 * MIB


def test_what_the_allocator_reserves_decides_whether_a_step_fits() -> None:
    card = simulated_device("RTX 4090")
    usable = card.usable_bytes or 0
    fits = card.verdict(usable - 2 * GIB, usable - GIB)
    assert fits.startswith("Fits ") and fits.endswith("which leaves 1.00 GiB to spare.")
    assert f"its allocator reserves {format_bytes(usable - GIB)}" in fits
    assert "the tensors would" in card.verdict(usable - GIB, usable + GIB)
    too_much = card.verdict(usable + GIB, usable + 2 * GIB)
    assert too_much.startswith("Does not fit ") and too_much.endswith(": 1.00 GiB too much.")
    assert card.verdict(usable - GIB, None).endswith("with 1.00 GiB to spare.")
    assert simulated_device("cpu").verdict(1, None) == ""
