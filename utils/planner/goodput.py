"""How much of a long run is training: failures, checkpoints, restarts.

Daly 2006 (A higher order estimate of the optimum checkpoint interval, Future Generation Computer
Systems 22), with mean time between failures M, checkpoint time d and restart time R: the best
interval is about sqrt(2 d M) (Young 1974), and the share of time that is work is
t / (M e^(R/M) (e^((t + d)/M) - 1)) at interval t (Daly's equation for the expected wall time).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.catalog import ModelShape, model_shape
from utils.checked import checked
from utils.planner.cluster import Cluster
from utils.planner.layout import Plan
from utils.rules import above_zero, of_kind, positive, whole

DAY = 86_400.0
MOST_SPARES = 1_000_000


@dataclass(frozen=True)
class FailureRate:
    """Failures that stop a job, per 1,000 node-days, as a range.

    Attributes:
        low, high: The range. Published: 3.8 for Llama 3 (419 unexpected interruptions of 2,048
            nodes in 54 days, arXiv:2407.21783, Table 5), 6.5 for nodes of Meta's RSC-1, and 24
            for its jobs of 1,024 GPUs, by their mean time to failure of 7.9 h (Kokolis et al.
            2024, arXiv:2410.21680).
    """

    low: float = 3.5
    high: float = 25.0

    def __post_init__(self) -> None:
        """Raises ValueError where the range is empty or not above zero."""
        positive("failure rate", least=0, low=self.low, high=self.high)
        if not 0 < self.low <= self.high:
            raise ValueError(
                f"Failure rates run from {self.low} to {self.high} per 1,000 node-days; write two "
                "numbers above zero, the lower one first."
            )


@dataclass(frozen=True)
class Goodput:
    """What failures leave of a run, at the low and the high failure rate.

    Attributes:
        share: Work over wall time, worst and best.
        seconds_between_failures: Mean, worst and best.
        checkpoint_interval_seconds: Daly's optimum, at the high and at the low rate.
        restart_seconds: From a failure to training again, waiting for a repair included.
        spares: Nodes that wait for one to fail, which `cost` pays; None where the cloud has more.
    """

    share: tuple[float, float]
    seconds_between_failures: tuple[float, float]
    checkpoint_interval_seconds: tuple[float, float]
    restart_seconds: tuple[float, float] = (0.0, 0.0)
    spares: int | None = None


@checked
def best_interval_seconds(checkpoint_seconds: float, mean_seconds_between_failures: float) -> float:
    """Daly's optimum of seconds of work between two checkpoints (Daly 2006, equation 37).

    Raises:
        ValueError: a time that is not above zero.
    """
    above_zero(
        "best_interval_seconds",
        checkpoint_seconds=checkpoint_seconds,
        mean_seconds_between_failures=mean_seconds_between_failures,
    )
    d, m = checkpoint_seconds, mean_seconds_between_failures
    if d >= 2 * m:
        return m
    x = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(x) / 3 + x / 9) - d


@checked
def working_share(
    interval: float, checkpoint_seconds: float, restart_seconds: float, mean_seconds: float
) -> float:
    """Share of wall time that is work, at a checkpoint interval; all in seconds.

    Raises:
        ValueError: an interval or a mean that is not above zero, or a negative time.
    """
    above_zero("working_share", interval=interval, mean_seconds=mean_seconds)
    positive(
        "working_share",
        least=0,
        checkpoint_seconds=checkpoint_seconds,
        restart_seconds=restart_seconds,
    )
    m = mean_seconds
    cycle = (interval + checkpoint_seconds) / m
    # Daly's e^(R/M) and e^(cycle) as their inverses: they overflow where failures are frequent,
    # and these go to 0, as does the share.
    return interval / m * math.exp(-restart_seconds / m - cycle) / -math.expm1(-cycle)


def goodput(
    cluster: Cluster,
    rate: FailureRate = FailureRate(),
    checkpoint_seconds: float = 10.0,
    restart_seconds: float = 300.0,
    spares: int | None = None,
    repair_seconds: float = DAY,
    checkpoint_interval_seconds: float | None = None,
) -> Goodput:
    """What failures leave of a run on a cluster that checkpoints at the best interval.

    Args:
        cluster: The machines; more nodes fail more often.
        rate: Failures per 1,000 node-days.
        checkpoint_seconds: What one checkpoint stops the training for, written asynchronously.
        restart_seconds: From a failure to training again on a node that is there, lost work aside.
        spares: Nodes that wait for one to fail. A job whose replicas are all needed, as with
            dp = 1, stands still where all of them are in repair. None: there is always one more, as
            in a large cloud.
        repair_seconds: How long a failed node is away.
        checkpoint_interval_seconds: Of work between two checkpoints; None for the best.

    Interruptions of a spot price come on top of the rate of failures; another node is there at
    once for one that was taken back.

    Raises:
        ValueError: a time below 1 second, or spares that are no whole number.
    """
    of_kind("goodput", cluster=(cluster, Cluster), rate=(rate, FailureRate))
    positive("goodput", checkpoint_seconds=checkpoint_seconds, restart_seconds=restart_seconds)
    positive("goodput", repair_seconds=repair_seconds)
    if spares is not None:
        whole("goodput", least=0, spares=spares)
    taken = cluster.interruptions_per_1000_node_days or 0.0
    rows = []
    for failed in (rate.high, rate.low):
        away = restart_seconds
        if spares is not None:
            between = 1000 * DAY / (failed * cluster.nodes)
            broken = failed / (failed + taken)
            away += broken * waiting_seconds(spares, repair_seconds, between)
        mean = 1000 * DAY / ((failed + taken) * cluster.nodes)
        rows.append(_at_rate(mean, checkpoint_seconds, away, checkpoint_interval_seconds))
    worst, best = rows
    pairs = ((low, high) for low, high in zip(worst, best, strict=True))
    return Goodput(*pairs, spares=None if spares is None else int(spares))


def _at_rate(
    mean: float, checkpoint: float, away: float, interval: float | None
) -> tuple[float, float, float, float]:
    """Share of time that is work, and the seconds between failures, checkpoints and to restart."""
    between = best_interval_seconds(checkpoint, mean) if interval is None else interval
    return working_share(between, checkpoint, away, mean), mean, between, away


@checked
def waiting_seconds(spares: int, repair_seconds: float, mean_seconds: float) -> float:
    """Seconds that a failure waits for a node on average.

    Nodes in repair are Poisson with repair over the time between failures as their mean (M/D/inf).
    Where all spares are among them, the first of `spares` + 1 comes back after a part of the repair.

    Raises:
        ValueError: a time that is not above zero, or spares that are none, or over a million.
    """
    above_zero("waiting_seconds", repair_seconds=repair_seconds, mean_seconds=mean_seconds)
    whole("waiting_seconds", least=0, spares=spares)
    if spares > MOST_SPARES:
        raise ValueError(
            f"waiting_seconds: spares is {spares:,}; it can be {MOST_SPARES:,} at most."
        )
    load, term = repair_seconds / mean_seconds, math.exp(-repair_seconds / mean_seconds)
    there = 0.0
    for n in range(spares):
        there += term
        term *= load / (n + 1)
    return (1 - there) * repair_seconds / (spares + 1)


@checked
def checkpoint_bytes(model: ModelShape | str, plan: Plan) -> float:
    """What one checkpoint writes: parameters, master copy and moments, each once."""
    model = model_shape(model)
    conventions = plan.conventions
    return model.parameter_count * (conventions.parameter_bytes + conventions.optimizer_bytes)
