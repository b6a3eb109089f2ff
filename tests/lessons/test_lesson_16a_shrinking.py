"""Runs that shrink: the same as runs that never wait where nothing is lost, and slower by what is missing."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from utils.lessons.lesson_16a.shrinking import shrinking_runs
from utils.planner.failing_runs import RunPlan, failing_runs
from utils.planner.goodput import DAY

PLAN = RunPlan(
    work_seconds=10 * DAY,
    interval_seconds=3600.0,
    save_seconds=120.0,
    restart_seconds=900.0,
    failures_per_1000_node_days=40.0,
    spares=0,
)
GROW_SECONDS = 600.0
SPEEDS = [replicas / 16 for replicas in range(16, 0, -1)]


def test_with_spares_for_all_it_is_the_run_that_never_waits() -> None:
    shrinks = shrinking_runs(replace(PLAN, spares=64), SPEEDS, GROW_SECONDS, 2000)
    waits = failing_runs(replace(PLAN, spares=None), 2000)
    assert shrinks.goodput.mean() == pytest.approx(waits.goodput.mean(), rel=0.01)
    assert shrinks.failures.mean() == pytest.approx(waits.failures.mean(), rel=0.05)
    assert not shrinks.missing.any()


def test_without_failures_only_saves_cost() -> None:
    calm = replace(PLAN, failures_per_1000_node_days=1e-9, work_seconds=10 * 3600.0)
    found = shrinking_runs(calm, SPEEDS, GROW_SECONDS, 3)
    assert found.wall_seconds == pytest.approx(10 * 3600 + 9 * 120.0), "nine saves between"
    assert not found.failures.any()


def one_by_one(plan: RunPlan, speeds: list[float], seed: int) -> tuple[float, int]:
    """The same run in plain Python, second by second of its own clock: wall seconds and failures."""
    chance, clock, done, since, pause, failures = random.Random(seed), 0.0, 0.0, 0.0, 0.0, 0
    away: list[float] = []
    while True:
        missing = max(0, 16 - (plan.nodes + (plan.spares or 0) - len(away)) // 2)
        rate = plan.failures_per_1000_node_days / (1000 * DAY) * 2 * (16 - missing)
        fails, back = clock + chance.expovariate(rate), min(away, default=float("inf"))
        while clock < min(fails, back):
            if pause:
                part = min(pause, min(fails, back) - clock)
                clock, pause = clock + part, pause - part
                continue
            # To the end of the work or of its piece, of the save, or to what happens first.
            piece = min(plan.interval_seconds, (plan.work_seconds - done) / speeds[missing])
            last = piece == (plan.work_seconds - done) / speeds[missing]
            if last and clock + piece - since <= min(fails, back):
                return clock + piece - since, failures
            cycle = plan.interval_seconds + plan.save_seconds
            part = min(cycle - since, min(fails, back) - clock)
            clock, since = clock + part, since + part
            if since >= cycle - 1e-6:
                done, since = done + plan.interval_seconds * speeds[missing], 0.0
        if fails < back:
            away, failures = [*away, clock + plan.repair_seconds], failures + 1
            since, pause = 0.0, plan.restart_seconds
            continue
        away.remove(back)
        if max(0, 16 - (plan.nodes + (plan.spares or 0) - len(away)) // 2) < missing:
            done += min(since, plan.interval_seconds) * speeds[missing]
            since, pause = 0.0, plan.save_seconds + GROW_SECONDS


@pytest.mark.parametrize("spares", [0, 1])
def test_all_at_once_is_one_by_one(spares: int) -> None:
    """The same means as a loop over single runs, within five standard errors."""
    plan = replace(PLAN, spares=spares)
    slow = np.array([one_by_one(plan, SPEEDS, seed) for seed in range(300)])
    quick = shrinking_runs(plan, SPEEDS, GROW_SECONDS, 3000)
    for single, many in ((slow[:, 0], quick.wall_seconds), (slow[:, 1], quick.failures)):
        error = single.std() / np.sqrt(len(single))
        assert abs(single.mean() - many.mean()) < 5 * error


def test_a_second_node_away_takes_no_second_replica() -> None:
    """Three nodes always away are two replicas of two: nodes are dealt out anew at each start."""
    never = replace(PLAN, failures_per_1000_node_days=1.0, repair_seconds=1e9)
    found = shrinking_runs(never, [1.0] * 16, GROW_SECONDS, 4000)
    odd = found.failures == 1
    assert odd.any() and (found.missing[odd] <= 1).all()
    even = found.failures == 2
    assert even.any() and (found.missing[even] <= 1).all(), "two nodes away are one replica"


def test_speeds_are_one_a_replica() -> None:
    with pytest.raises(ValueError, match="32 nodes do not divide"):
        shrinking_runs(PLAN, SPEEDS[:5], GROW_SECONDS)
    with pytest.raises(ValueError, match="count"):
        shrinking_runs(PLAN, SPEEDS, GROW_SECONDS, 0)
    with pytest.raises(ValueError, match="grow_seconds"):
        shrinking_runs(PLAN, SPEEDS, -1.0)
