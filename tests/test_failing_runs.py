"""Runs event by event: every second has a kind, and the mean is Daly's where it should be."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.planner.failing_runs import KINDS, RunPlan, failing_run, failing_runs
from utils.planner.goodput import DAY, best_interval_seconds, waiting_seconds, working_share

PLAN = RunPlan(work_seconds=30 * DAY, interval_seconds=3600.0)


@pytest.mark.parametrize("rate, save, restart", [(6.5, 10.0, 300.0), (25.0, 120.0, 900.0)])
def test_the_mean_is_dalys_formula(rate: float, save: float, restart: float) -> None:
    """Within 2%, at half the best interval, at the best and at twice that."""
    plan = replace(
        PLAN, failures_per_1000_node_days=rate, save_seconds=save, restart_seconds=restart
    )
    best = best_interval_seconds(save, plan.mean_seconds)
    for interval in (best / 2, best, 2 * best):
        runs = [r.goodput for r in failing_runs(replace(plan, interval_seconds=interval), 200)]
        daly = working_share(interval, save, restart, plan.mean_seconds)
        assert statistics.mean(runs) == pytest.approx(daly, rel=0.02), f"interval {interval:.0f} s"


def test_spares_wait_as_the_formula_says() -> None:
    """It takes failures to go on while a run waits; they do not, so the mean wait is a little less."""
    plan = replace(PLAN, work_seconds=1000 * DAY, interval_seconds=3 * 3600.0, spares=1)
    found = list(failing_runs(plan, 30))
    each = sum(r.seconds("waiting") for r in found) / sum(r.failures for r in found)
    formula = waiting_seconds(1, plan.repair_seconds, plan.mean_seconds)
    assert 0.9 * formula < each < 1.02 * formula, "seconds that a failure waits for a node"


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
        work_seconds=3 * DAY, interval_seconds=interval, spares=spares,
        failures_per_1000_node_days=rate,
    )  # fmt: skip
    found = failing_run(plan, seed)
    assert {p.kind for p in found.pieces} <= set(KINDS), "an unknown kind"
    assert found.pieces[0].begin_seconds == 0, "the clock begins at 0"
    ends = [p.end_seconds for p in found.pieces[:-1]]
    assert ends == [p.begin_seconds for p in found.pieces[1:]], "a gap, or two kinds at once"
    assert found.seconds("work") == pytest.approx(plan.work_seconds), "work is missing, or twice"


def test_without_failures_only_saves_cost() -> None:
    plan = replace(PLAN, failures_per_1000_node_days=1e-9, work_seconds=10 * 3600.0)
    found = failing_run(plan)
    assert found.failures == 0, "a failure in a thousand million years"
    assert found.wall_seconds == pytest.approx(10 * 3600 + 9 * 10.0), "nine saves of 10 s between"


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
