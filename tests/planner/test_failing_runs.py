"""Runs event by event: every second has a kind, and the mean is Daly's where it should be."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.lessons.lesson_16.failure_logs import (
    FAILURE_LOGS,
    FailureLog,
    at_most,
    per_1000_node_days,
    poisson_interval,
)
from utils.planner.failing_runs import KINDS, RunPlan, failing_runs
from utils.planner.goodput import (
    DAY,
    FailureRate,
    best_interval_seconds,
    waiting_seconds,
    working_share,
)

PLAN = RunPlan(work_seconds=30 * DAY, interval_seconds=3600.0)


@pytest.mark.parametrize("rate, save, restart", [(6.5, 10.0, 300.0), (25.0, 120.0, 900.0)])
def test_the_mean_is_dalys_formula(rate: float, save: float, restart: float) -> None:
    """Within 1%, at half the best interval, at the best and at twice that."""
    plan = replace(
        PLAN, failures_per_1000_node_days=rate, save_seconds=save, restart_seconds=restart
    )
    best = best_interval_seconds(save, plan.mean_seconds)
    for interval in (best / 2, best, 2 * best):
        found = failing_runs(replace(plan, interval_seconds=interval), 2000)
        daly = working_share(interval, save, restart, plan.mean_seconds)
        simulated = found.seconds["work"].mean() / found.wall_seconds.mean()
        assert simulated == pytest.approx(daly, rel=0.01), f"interval {interval:.0f} s"


def test_failures_every_few_minutes_too() -> None:
    """Where a failure in the restart is as likely as not, and work is mostly lost."""
    plan = RunPlan(
        work_seconds=2 * DAY,
        interval_seconds=900.0,
        save_seconds=60.0,
        restart_seconds=600.0,
        nodes=2048,
        failures_per_1000_node_days=24.0,
    )
    found = failing_runs(plan, 400)
    daly = working_share(900.0, 60.0, 600.0, plan.mean_seconds)
    simulated = found.seconds["work"].mean() / found.wall_seconds.mean()
    assert simulated == pytest.approx(daly, rel=0.02), f"mean between failures {plan.mean_seconds}"


def one_by_one(plan: RunPlan, seed: int) -> dict[str, float]:
    """The same run in plain Python, save by save, with a list of repairs: the slow way."""
    chance, clock, done = random.Random(seed), 0.0, 0.0
    spent, repairs = dict.fromkeys(KINDS, 0.0), []
    ready = 0.0
    while done < plan.work_seconds:
        fails_at = clock + chance.expovariate(1 / plan.mean_seconds)
        spent["restarting"] += min(ready, fails_at) - clock if ready else 0.0
        clock = min(ready, fails_at) if ready else clock
        while clock < fails_at and done < plan.work_seconds:
            part = min(plan.interval_seconds, plan.work_seconds - done)
            save = plan.save_seconds if done + part < plan.work_seconds else 0.0
            if clock + part + save > fails_at:
                spent["lost"] += fails_at - clock
                clock = fails_at
                break
            spent["work"], spent["saving"] = spent["work"] + part, spent["saving"] + save
            clock, done = clock + part + save, done + part
        if done < plan.work_seconds and plan.spares is not None:
            repairs = sorted(
                [back for back in repairs if back > clock] + [clock + plan.repair_seconds]
            )
            if len(repairs) > plan.spares:
                there = repairs.pop(0)
                spent["waiting"] += there - clock
                clock = there
        ready = clock + plan.restart_seconds
    return spent


@pytest.mark.parametrize("spares", [None, 0, 1, 3])
def test_all_at_once_is_one_by_one(spares: int | None) -> None:
    """The same means as a loop over single runs, kind by kind, within five standard errors."""
    plan = replace(
        PLAN,
        work_seconds=10 * DAY,
        spares=spares,
        failures_per_1000_node_days=40.0,
        repair_seconds=DAY,
        save_seconds=120.0,
    )
    slow = [one_by_one(plan, seed) for seed in range(400)]
    quick = failing_runs(plan, 4000)
    for kind in KINDS:
        single = np.array([run[kind] for run in slow])
        error = max(1.0, single.std() / 20)
        assert abs(single.mean() - quick.seconds[kind].mean()) < 5 * error, kind


def test_spares_wait_as_the_formula_says() -> None:
    """It takes failures to go on while a run waits; they do not, so the mean wait is a little less."""
    plan = replace(PLAN, work_seconds=1000 * DAY, interval_seconds=3 * 3600.0, spares=1)
    found = failing_runs(plan, 30)
    each = found.seconds["waiting"].sum() / found.failures.sum()
    formula = waiting_seconds(1, plan.repair_seconds, plan.mean_seconds)
    assert 0.85 * formula < each < 1.02 * formula, "seconds that a failure waits for a node"


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    interval=st.floats(60, 40 * 3600),
    spares=st.none() | st.integers(0, 3),
    rate=st.floats(1, 60),
)
def test_every_second_has_one_kind(
    seed: int, interval: float, spares: int | None, rate: float
) -> None:
    plan = RunPlan(
        work_seconds=3 * DAY,
        interval_seconds=interval,
        spares=spares,
        failures_per_1000_node_days=rate,
    )
    found = failing_runs(plan, 5, seed)
    assert set(found.seconds) == set(KINDS), "a kind is missing"
    assert min(part.min() for part in found.seconds.values()) >= 0, "time runs forward"
    assert found.seconds["work"] == pytest.approx(plan.work_seconds), "work is missing, or twice"
    saves = np.ceil(plan.work_seconds / interval) - 1
    assert found.seconds["saving"] == pytest.approx(saves * plan.save_seconds), "each save once"
    assert not (spares is None and found.seconds["waiting"].any()), "a node was at hand"


def test_without_failures_only_saves_cost() -> None:
    plan = replace(PLAN, failures_per_1000_node_days=1e-9, work_seconds=10 * 3600.0)
    found = failing_runs(plan, 3)
    assert not found.failures.any(), "a failure in a thousand million years"
    assert found.wall_seconds == pytest.approx(10 * 3600 + 9 * 10.0), "nine saves of 10 s between"


def test_published_figures_lie_inside() -> None:
    """Rates inside the planner's range; Llama 3's count and its share of useful time, RSC-1's hours."""
    rate, llama = FailureRate(), FAILURE_LOGS[0]
    for log in FAILURE_LOGS:
        assert rate.low <= log.failures_per_1000_node_days <= rate.high, log.name
    rsc = next(log for log in FAILURE_LOGS if log.name == "RSC-1, nodes")
    assert rsc.hours_between(16_384) == pytest.approx(1.8, abs=0.05), "as that paper projects"
    # At their own rate and the best interval: quick saves and restarts, and slow ones.
    shares = []
    for save, restart in ((10.0, 300.0), (60.0, 900.0)):
        plan = RunPlan(
            work_seconds=50 * DAY,
            interval_seconds=1.0,
            save_seconds=save,
            nodes=2048,
            restart_seconds=restart,
            failures_per_1000_node_days=llama.failures_per_1000_node_days,
        )
        best = best_interval_seconds(save, plan.mean_seconds)
        found = failing_runs(replace(plan, interval_seconds=best), 500)
        counts = np.quantile(found.failures * 54 * DAY / found.wall_seconds, (0.025, 0.975))
        assert counts[0] <= 419 <= counts[1], "the count of failures in 54 days"
        shares.append(found.goodput.mean())
    assert shares[1] < 0.90 < shares[0], f"they report more than 90% of useful time: {shares}"


def test_the_interval_of_a_count_is_exact() -> None:
    """Garwood's limits: a count of 0 excludes means above 3.69, one of 10 those outside 4.80 to 18.39."""
    assert poisson_interval(0) == (0.0, pytest.approx(3.6889, abs=1e-3))
    assert poisson_interval(10) == pytest.approx((4.7954, 18.3904), abs=1e-3)
    low, high = poisson_interval(419)
    assert at_most(418, low) == pytest.approx(0.975, abs=1e-6), "419 or more, once in 40"
    assert at_most(419, high) == pytest.approx(0.025, abs=1e-6), "419 or fewer, once in 40"
    assert at_most(3, 0.0) == 1.0, "nothing ever happens"


def test_a_log_as_rates() -> None:
    assert per_1000_node_days(419, 16_384, 54) == pytest.approx(3.7887, abs=1e-3), "419 / 110,592"
    log = FailureLog("one a day on 8 GPUs", 1000.0, 1, "made up")
    assert log.hours_between(8) == pytest.approx(24), "hours"
    assert log.per_gpu_hour == pytest.approx(1 / 192), "192 GPU hours"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"failures_per_1000_node_days": 0.0}, "give a rate above zero"),
        ({"failures_per_1000_node_days": 50_000.0}, "more than a minute between two failures"),
        ({"interval_seconds": 0.0}, "interval_seconds"),
        ({"spares": -1}, "spares"),
        ({"nodes": 0}, "nodes"),
        ({"repair_seconds": -1.0}, "repair_seconds"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(PLAN, **change)


def test_odd_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="count"):
        failing_runs(PLAN, 0)
    with pytest.raises(ValueError, match="count"):
        poisson_interval(-1)
    with pytest.raises(ValueError, match="a share between 0 and 1"):
        poisson_interval(1, 95)
    with pytest.raises(ValueError, match="days"):
        per_1000_node_days(1, 8, 0)
