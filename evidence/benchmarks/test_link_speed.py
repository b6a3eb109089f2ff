"""What messages cost on this machine, and on the slow link of two hosts, beside what is predicted."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from utils.lessons.lesson_11 import algorithms
from utils.lessons.lesson_11.hosts import run_hosts
from utils.lessons.lesson_11.wire import Wire
from utils.ranks import run_ranks
from utils.traffic.cost import fit_alpha_beta
from utils.units import MIB

from .conftest import Report

SIZES = [2**power for power in range(12, 27)]  # 4 KiB to 64 MiB
MEGABITS = 400.0


def one_way(wire: Wire, sizes: list[int], repeats: int = 7) -> list[float]:
    """Half of the seconds there and back between the first rank and the last, by size."""
    found, last = [], wire.size - 1
    for size in sizes:
        x, seconds = torch.ones(size // 4), []
        for _ in range(repeats):
            start = time.perf_counter()
            if wire.rank == 0:
                wire.send(x, last)
                wire.receive(x, last)
            elif wire.rank == last:
                wire.send(wire.receive(x, 0), 0)
            seconds.append((time.perf_counter() - start) / 2)
        found.append(statistics.median(seconds))
    return found


def test_alpha_beta_predicts_sizes_it_was_not_fitted_to(report: Report) -> None:
    seconds = run_ranks(lambda: one_way(Wire(), SIZES), 2)[0]
    cost = fit_alpha_beta(SIZES[::2], seconds[::2])
    errors = {
        n: abs(cost.seconds(n) / t - 1) for n, t in zip(SIZES[1::2], seconds[1::2], strict=True)
    }
    worst = max(errors, key=lambda n: errors[n])
    report(
        "alpha-beta, 4 KiB to 64 MiB, median error on held-out sizes",
        statistics.median(errors.values()),
        0.25,
        "x",
    )
    report(f"alpha-beta, its worst size, {worst:,} bytes", errors[worst], 0.25, "x")
    report("start of a message between two ranks", cost.alpha_seconds, 1e-3)


def race(wire: Wire) -> dict[str, float]:
    """Seconds of an all-reduce of 4 MiB."""
    found = {}
    ways = {"flat": algorithms.ring_all_reduce, "hierarchical": algorithms.hierarchical_all_reduce}
    for name, reduce in ways.items():
        seconds = []
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            reduce(wire, torch.ones(MIB))
            seconds.append(time.perf_counter() - start)
        found[name] = statistics.median(seconds)
    return found


@pytest.mark.parametrize("size", [4 * MIB])
def test_the_slow_link_beside_what_it_was_told(report: Report, size: int) -> None:
    run = run_hosts(lambda wire: one_way(wire, [size], 3)[0], 1, megabits_per_second=MEGABITS)
    reached = 8 * size / run.results[0] / 1e6 / MEGABITS
    report(f"slow link ({run.transport}), share of {MEGABITS:.0f} Mbit/s", reached, 1.0, "x")
    found = run_hosts(race, 4, megabits_per_second=MEGABITS).results[0]
    report(
        "hierarchical over flat ring, two hosts of four, 4 MiB",
        found["hierarchical"] / found["flat"],
        1.0,
        "x",
    )
