"""A long run event by event: failures, saves, restarts, repairs, on a clock of its own.

Where the times between failures are exponential and a node is always at hand, the mean over many
runs is Daly's formula (`utils.planner.goodput`, Daly 2006). With spares, repairs and saves that are
found broken there is no formula, and here is the run itself.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from utils.catalog.rules import positive, whole
from utils.planner.goodput import DAY

# What a second of wall time went into. Work that a failure destroys is "lost", not "work".
KINDS = ("work", "saving", "lost", "restarting", "waiting")


@dataclass(frozen=True)
class RunPlan:
    """A run and the machines it is on; times in seconds.

    Attributes:
        work_seconds: Training that is to be done, without saves and failures.
        interval_seconds: Of work between two saves.
        save_seconds: What a save stops the training for.
        restart_seconds: From a node that is there to training again.
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
            "a run", least=0, work_seconds=self.work_seconds, save_seconds=self.save_seconds,
            restart_seconds=self.restart_seconds, repair_seconds=self.repair_seconds,
        )  # fmt: skip
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


class Piece(NamedTuple):
    """A stretch of wall time and what it went into, one of `KINDS`."""

    kind: str
    begin_seconds: float
    end_seconds: float


@dataclass
class RunOutcome:
    """What became of one run's wall time, piece by piece."""

    pieces: list[Piece] = field(default_factory=list)
    failures: int = 0

    @property
    def wall_seconds(self) -> float:
        return self.pieces[-1].end_seconds

    def seconds(self, kind: str) -> float:
        """All of one kind."""
        return sum(p.end_seconds - p.begin_seconds for p in self.pieces if p.kind == kind)

    @property
    def goodput(self) -> float:
        """Share of wall time that is work which lasted."""
        return self.seconds("work") / self.wall_seconds


def failing_run(plan: RunPlan, seed: int = 0) -> RunOutcome:
    """One run of a plan, to its end.

    A failure takes the work since the last whole save, the save itself if it was under way, and may
    come again during the restart. Failures go on while the run waits for a repair.
    """
    chance = random.Random(seed)
    outcome, clock, done = RunOutcome(), 0.0, 0.0
    repairs: list[float] = []  # when nodes that are away come back, earliest first
    while True:
        fails_at = clock + chance.expovariate(1 / plan.mean_seconds)
        clock, done = _train(outcome, plan, clock, fails_at, done)
        if done >= plan.work_seconds:
            return outcome
        outcome.failures += 1
        clock = _recover(outcome, plan, clock, repairs, chance)


def failing_runs(plan: RunPlan, count: int, seed: int = 0) -> Iterator[RunOutcome]:
    """Runs of one plan that differ by chance alone."""
    return (failing_run(plan, seed + number) for number in range(count))


def _train(
    outcome: RunOutcome, plan: RunPlan, clock: float, fails_at: float, done: float
) -> tuple[float, float]:
    """Work and save until the end or the failure: the clock then, and the work that lasts."""
    while done < plan.work_seconds:
        part = min(plan.interval_seconds, plan.work_seconds - done)
        save = plan.save_seconds if done + part < plan.work_seconds else 0.0
        if clock + part + save > fails_at:
            outcome.pieces.append(Piece("lost", clock, fails_at))
            return fails_at, done
        outcome.pieces.append(Piece("work", clock, clock + part))
        if save:
            outcome.pieces.append(Piece("saving", clock + part, clock + part + save))
        clock, done = clock + part + save, done + part
    return clock, done


def _recover(
    outcome: RunOutcome, plan: RunPlan, clock: float, repairs: list[float], chance: random.Random
) -> float:
    """From a failure until all nodes train again: the clock then."""
    while True:
        clock = _node_at_hand(outcome, plan, clock, repairs)
        fails_at = clock + chance.expovariate(1 / plan.mean_seconds)
        ready = clock + plan.restart_seconds
        outcome.pieces.append(Piece("restarting", clock, min(ready, fails_at)))
        if ready <= fails_at:
            return ready
        clock, outcome.failures = fails_at, outcome.failures + 1


def _node_at_hand(outcome: RunOutcome, plan: RunPlan, clock: float, repairs: list[float]) -> float:
    """When another node takes the failed one's place: at once, or at the end of a repair."""
    if plan.spares is None:
        return clock
    while repairs and repairs[0] <= clock:
        heapq.heappop(repairs)
    heapq.heappush(repairs, clock + plan.repair_seconds)
    if len(repairs) <= plan.spares:
        return clock
    there = heapq.heappop(repairs)
    outcome.pieces.append(Piece("waiting", clock, there))
    return there
