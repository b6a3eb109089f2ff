"""Long runs event by event: failures, saves, restarts and repairs, thousands of runs at once.

Where the times between failures are exponential and a node is always at hand, the mean wall time is
Daly's formula (`utils.planner.goodput`, Daly 2006). With spares and repairs there is no formula, and
a mean says nothing of the spread: here are the runs themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from utils.planner.goodput import DAY
from utils.rules import positive, whole

# What a second of wall time went into. Work that a failure destroys is "lost", not "work".
KINDS = ("work", "saving", "lost", "restarting", "waiting")


@dataclass(frozen=True)
class RunPlan:
    """A run and the machines it is on; times in seconds.

    Attributes:
        work_seconds: Training that is to be done, without saves and failures.
        interval_seconds: Of work between two saves.
        save_seconds: What a save stops the training for.
        restart_seconds: From a node that is there to training again, detection included.
        nodes: All are needed: the run stands still while one is missing.
        failures_per_1000_node_days: Of one node; each fails by itself, at any moment alike.
        spares: Nodes that stand by; None for a cloud that always has one more.
        repair_seconds: How long a failed node is away.
    """

    work_seconds: float
    interval_seconds: float
    save_seconds: float = 10.0
    restart_seconds: float = 300.0
    nodes: int = 32
    failures_per_1000_node_days: float = 6.5
    spares: int | None = None
    repair_seconds: float = DAY

    def __post_init__(self) -> None:
        """Raises ValueError for a time or rate that is not above zero, or an odd count."""
        positive(
            "a run",
            least=0,
            work_seconds=self.work_seconds,
            save_seconds=self.save_seconds,
            restart_seconds=self.restart_seconds,
            repair_seconds=self.repair_seconds,
        )
        positive("a run", interval_seconds=self.interval_seconds)
        whole("a run", least=1, nodes=self.nodes)
        if self.spares is not None:
            whole("a run", least=0, spares=self.spares)
        rate = self.failures_per_1000_node_days
        if not 0 < rate * self.nodes < 60 * 24 * 1000:
            raise ValueError(
                f"{rate} failures per 1,000 node-days on {self.nodes} nodes: give a rate above zero "
                "that leaves more than a minute between two failures of the run."
            )

    @property
    def mean_seconds(self) -> float:
        """Between two failures of the run."""
        return 1000 * DAY / (self.failures_per_1000_node_days * self.nodes)


@dataclass(frozen=True)
class RunOutcomes:
    """What became of each run's wall time: one number a run.

    Attributes:
        seconds: By kind, one of `KINDS`.
        failures: How many the run met.
    """

    seconds: dict[str, np.ndarray]
    failures: np.ndarray

    @property
    def wall_seconds(self) -> np.ndarray:
        """From the start to the last step."""
        return np.sum(list(self.seconds.values()), axis=0)

    @property
    def goodput(self) -> np.ndarray:
        """Share of wall time that is work which lasted."""
        return self.seconds["work"] / self.wall_seconds

    def share(self, kind: str) -> float:
        """Of the wall time of all runs together."""
        return float(self.seconds[kind].sum() / self.wall_seconds.sum())


def failing_runs(plan: RunPlan, count: int = 2000, seed: int = 0) -> RunOutcomes:
    """Runs of one plan that differ by chance alone, each to its end.

    All runs take a step from failure to failure together. A failure takes the work since the last
    whole save, the save itself if it was under way, and may come again during the restart. Nodes
    do not fail while the run waits for a repair.

    Raises:
        ValueError: `count` below one.
    """
    whole("failing_runs", least=1, count=count)
    chance = np.random.default_rng(seed)
    runs = _Runs(plan, count)
    runs.train(chance.exponential(plan.mean_seconds, count))
    while runs.unfinished.any():
        runs.fail()
        runs.recover(chance.exponential(plan.mean_seconds, count))
    return RunOutcomes(runs.seconds, runs.failures)


class _Runs:
    """The state of many runs of one plan: clocks, work that is saved, and failed nodes."""

    def __init__(self, plan: RunPlan, count: int) -> None:
        self.plan = plan
        self.seconds = {kind: np.zeros(count) for kind in KINDS}
        self.failures = np.zeros(count, dtype=int)
        self.saves = np.zeros(count)  # whole ones
        self.clock = np.zeros(count)
        # The last failures of each run, by turns: one more than there are spares.
        self.failed_at = np.full((count, (plan.spares or 0) + 1), -np.inf)
        # The last piece of work has no save behind it.
        self.saves_wanted = max(0, int(np.ceil(plan.work_seconds / plan.interval_seconds)) - 1)
        self.unfinished = np.full(count, plan.work_seconds > 0)

    def spend(self, kind: str, seconds: np.ndarray) -> None:
        """Let time pass in the runs that are not finished."""
        seconds = np.where(self.unfinished, seconds, 0.0)
        self.seconds[kind] += seconds
        self.clock += seconds

    def train(self, until_failure: np.ndarray) -> None:
        """Work and save until the end or the failure, whichever comes first."""
        plan = self.plan
        cycle = plan.interval_seconds + plan.save_seconds
        left = self.saves_wanted - self.saves
        last = plan.work_seconds - self.saves_wanted * plan.interval_seconds
        ends = until_failure >= left * cycle + last
        whole_cycles = np.where(ends, left, np.minimum(left, until_failure // cycle))
        self.saves += np.where(self.unfinished, whole_cycles, 0)
        self.spend("saving", whole_cycles * plan.save_seconds)
        self.spend("work", whole_cycles * plan.interval_seconds + np.where(ends, last, 0.0))
        self.spend("lost", np.where(ends, 0.0, until_failure - whole_cycles * cycle))
        self.unfinished &= ~ends

    def fail(self) -> None:
        """A node leaves; another takes its place at once, or after a repair."""
        plan, rows = self.plan, np.arange(len(self.clock))
        turn = self.failures % self.failed_at.shape[1]
        self.failed_at[rows, turn] = np.where(
            self.unfinished, self.clock, self.failed_at[rows, turn]
        )
        self.failures += self.unfinished
        if plan.spares is None:
            return
        # With s spares, failure n waits for the node that failed as number n - s.
        first = self.failed_at[rows, (turn + 1) % self.failed_at.shape[1]]
        self.spend("waiting", np.maximum(0.0, first + plan.repair_seconds - self.clock))

    def recover(self, until_failure: np.ndarray) -> None:
        """Restart, and train on unless the next failure comes first."""
        again = until_failure < self.plan.restart_seconds
        self.spend("restarting", np.where(again, until_failure, self.plan.restart_seconds))
        resting, self.unfinished = self.unfinished & again, self.unfinished & ~again
        self.train(until_failure - self.plan.restart_seconds)
        self.unfinished |= resting
