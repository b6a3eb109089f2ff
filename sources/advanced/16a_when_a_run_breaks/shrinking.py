"""Long runs that go on with fewer replicas while nodes are in repair, a thousand at once.

`utils.planner.failing_runs` has the runs that wait for a node. Here nobody waits: torchrun starts the replicas
for which there are nodes, slower, and starts all again when a repaired node makes one more whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from utils.checked import check_public
from utils.planner.failing_runs import RunPlan
from utils.planner.goodput import DAY
from utils.rules import positive, whole


class ShrinkingRuns(NamedTuple):
    """What became of each run: one number a run.

    `missing` counts replicas, as a mean over the wall time.
    """

    work_seconds: float
    wall_seconds: np.ndarray
    failures: np.ndarray
    missing: np.ndarray

    @property
    def goodput(self) -> np.ndarray:
        """Work that lasted, in seconds of the whole job, over wall time."""
        return self.work_seconds / self.wall_seconds


def shrinking_runs(
    plan: RunPlan,
    speeds: Sequence[float],
    grow_seconds: float,
    count: int = 1000,
    seed: int = 0,
) -> ShrinkingRuns:
    """Runs of one plan that differ by chance alone, each to its end.

    Nodes are interchangeable: torchrun deals them out anew at each start, so two nodes in repair take one
    replica of two nodes. A failure takes the work since the last save; a replica that comes back takes a
    save and a restart. Nodes that do no work do not fail.

    Args:
        plan: Its `spares` stand by (None is none); `restart_seconds` includes noticing.
        speeds: Of the whole job, with 0, 1, 2, ... of its replicas missing: as many as there are replicas.
        grow_seconds: What a replica that comes back costs after a save: a restart that nobody must notice.
        count: Of runs.
        seed: Of their failures.

    Raises:
        ValueError: `count` below one, or nodes that do not divide into that many replicas.
    """
    whole("shrinking_runs", least=1, count=count)
    positive("shrinking_runs", least=0, grow_seconds=grow_seconds)
    if not speeds or plan.nodes % len(speeds):
        raise ValueError(
            f"speeds has {len(speeds)} entries, one a replica: {plan.nodes} nodes do not divide by it."
        )
    runs = _Runs(plan, np.asarray(speeds, dtype=float), grow_seconds, count)
    chance = np.random.default_rng(seed)
    while runs.unfinished.any():
        runs.pass_event(chance.exponential(1.0, count))
    return ShrinkingRuns(plan.work_seconds, runs.clock, runs.failures, runs.missed / runs.clock)


class _Runs:
    """The state of many runs of one plan: clocks, saved work, and when each node in repair is back."""

    def __init__(self, plan: RunPlan, speeds: np.ndarray, grow: float, count: int) -> None:
        self.plan, self.speeds, self.grow_seconds = plan, speeds, grow
        self.clock, self.saved, self.missed = np.zeros(count), np.zeros(count), np.zeros(count)
        self.pause, self.since = np.zeros(count), np.zeros(count)  # restart ahead; since the save
        self.failures = np.zeros(count, dtype=int)
        self.back_at = np.full((count, plan.nodes + (plan.spares or 0)), np.inf)
        self.unfinished = np.full(count, plan.work_seconds > 0)

    def missing(self) -> np.ndarray:
        """Replicas for which there are no nodes; the last one never goes."""
        each = self.plan.nodes // len(self.speeds)
        there = np.isinf(self.back_at).sum(axis=1) // each
        return np.clip(len(self.speeds) - there, 0, len(self.speeds) - 1)

    def pass_event(self, chance: np.ndarray) -> None:
        """Train until a node fails, a repair ends or the work is done, whichever comes first."""
        missing = self.missing()
        working = self.plan.nodes * (1 - missing / len(self.speeds))
        fails = chance * 1000 * DAY / (self.plan.failures_per_1000_node_days * working)
        first = self.back_at.argmin(axis=1)
        repair = self.back_at[np.arange(len(first)), first] - self.clock
        until = np.minimum(fails, repair)
        self._train(until, missing)
        failed = self.unfinished & (fails < repair)
        self._fail(failed)
        self._repair(self.unfinished & ~failed, first, missing)

    def _train(self, until: np.ndarray, missing: np.ndarray) -> None:
        plan, speed = self.plan, self.speeds[missing]
        cycle = plan.interval_seconds + plan.save_seconds
        left = (plan.work_seconds - self.saved) / speed
        saves = np.maximum(0, np.ceil(left / plan.interval_seconds - 1e-9) - 1)
        ends = self.pause + left + saves * plan.save_seconds - self.since
        passed = np.where(self.unfinished, np.minimum(until, ends), 0.0)
        self.clock += passed
        self.missed += passed * missing
        done = self.since + np.maximum(0.0, passed - self.pause)
        whole_cycles = done // cycle
        self.saved += whole_cycles * plan.interval_seconds * speed
        self.since = done - whole_cycles * cycle
        self.pause = np.maximum(0.0, self.pause - passed)
        self.unfinished &= ends > until

    def _fail(self, runs: np.ndarray) -> None:
        rows = np.flatnonzero(runs)
        free = np.isinf(self.back_at[rows]).argmax(axis=1)
        self.back_at[rows, free] = self.clock[rows] + self.plan.repair_seconds
        self.failures += runs
        self.since[rows], self.pause[rows] = 0.0, self.plan.restart_seconds

    def _repair(self, runs: np.ndarray, first: np.ndarray, missing: np.ndarray) -> None:
        rows = np.flatnonzero(runs)
        self.back_at[rows, first[rows]] = np.inf
        grows = rows[(self.missing() < missing)[rows]]
        kept = np.minimum(self.since[grows], self.plan.interval_seconds)
        self.saved[grows] += kept * self.speeds[missing[grows]]
        self.since[grows] = 0.0
        self.pause[grows] = self.plan.save_seconds + self.grow_seconds


__all__ = ["ShrinkingRuns", "shrinking_runs"]

check_public(globals())
