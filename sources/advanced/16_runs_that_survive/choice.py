"""The problems of lab 16's choice of mode, interval and spares, and their exact optimum."""

from __future__ import annotations

from typing import NamedTuple

from utils.planner.goodput import DAY, best_interval_seconds, waiting_seconds, working_share

HOUR = 3600.0
MODES = ("sync", "async")
MOST_SPARES = 8
Choice = tuple[str, float, int]


class PlannedRun(NamedTuple):
    """A run that is to be planned; what the learner gets is `_asdict()`."""

    work_days: float
    nodes: int
    failures_per_1000_node_days: float
    write_seconds: float  # until a save is whole
    copy_seconds: float  # what an asynchronous save blocks
    restart_seconds: float
    repair_seconds: float
    usd_per_node_hour: float
    budget_usd: float


class Bill(NamedTuple):
    """What a choice takes on average."""

    days: float
    usd: float


def bill(job: PlannedRun, mode: str, interval_seconds: float, spares: int) -> Bill:
    """Days and dollars by Daly's formula.

    An asynchronous save blocks for the copy alone, but a failure during the write takes it: on
    average each failure loses the seconds of the write more.
    """
    mean = 1000 * DAY / (job.failures_per_1000_node_days * job.nodes)
    save = job.write_seconds if mode == "sync" else job.copy_seconds
    away = job.restart_seconds + waiting_seconds(spares, job.repair_seconds, mean)
    away += 0.0 if mode == "sync" else job.write_seconds
    days = job.work_days / working_share(interval_seconds, save, away, mean)
    return Bill(days, days * 24 * (job.nodes + spares) * job.usd_per_node_hour)


def best_interval(job: PlannedRun, mode: str) -> float:
    """Daly's; an asynchronous save must be whole before the next one begins."""
    mean = 1000 * DAY / (job.failures_per_1000_node_days * job.nodes)
    if mode == "sync":
        return best_interval_seconds(job.write_seconds, mean)
    return max(best_interval_seconds(job.copy_seconds, mean), job.write_seconds)


def best_choice(job: PlannedRun) -> Choice | None:
    """The fewest days within the budget; None where nothing is."""
    every = [(mode, best_interval(job, mode), n) for mode in MODES for n in range(MOST_SPARES + 1)]
    paid = [choice for choice in every if bill(job, *choice).usd <= job.budget_usd]
    return min(paid, key=lambda choice: bill(job, *choice).days, default=None)


_SEVENTY = PlannedRun(30, 32, 6.5, 60, 4, 900, DAY, 8 * 2.95, 0)
_FLAKY = PlannedRun(30, 32, 24, 300, 20, 900, 2 * DAY, 8 * 2.95, 0)
_LARGE = PlannedRun(54, 2048, 3.8, 30, 25, 300, DAY / 4, 8 * 2.95, 0)
_SLOW_STORE = PlannedRun(10, 128, 24, 1800, 5, 600, DAY / 2, 8 * 2.95, 0)
_SLOW_COPY = PlannedRun(20, 128, 24, 600, 595, 300, DAY / 2, 8 * 2.95, 0)


def _with_budget(job: PlannedRun, spares: int, more: float) -> PlannedRun:
    """A budget of what the best choice with that many spares takes, times `more`."""
    cost = min(bill(job, mode, best_interval(job, mode), spares).usd for mode in MODES)
    return job._replace(budget_usd=more * cost)


# What the verdict calls it, and the job; the second has its budget to the cent.
JOBS = (
    ("70B on 32 nodes, money to spare", _with_budget(_SEVENTY, 3, 1.2)),
    ("70B on 32 nodes, the budget of one spare", _with_budget(_SEVENTY, 1, 1.0 + 1e-12)),
    ("a flaky cluster", _with_budget(_FLAKY, 3, 1.001)),
    ("2,048 nodes", _with_budget(_LARGE, 6, 1.0005)),
    ("a slow store, where a save takes half an hour", _with_budget(_SLOW_STORE, 4, 1.01)),
    ("hosts so slow that the copy takes as long as the write", _with_budget(_SLOW_COPY, 3, 1.01)),
    ("a budget that no plan keeps", _SEVENTY._replace(budget_usd=1000.0)),
)
