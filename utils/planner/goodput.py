"""How much of a long run is training: failures, checkpoints, restarts.

Daly 2006 (A higher order estimate of the optimum checkpoint interval, Future Generation Computer
Systems 22), with mean time between failures M, checkpoint time d and restart time R: the best
interval is about sqrt(2 d M) (Young 1974), and the share of time that is work is
t / (M e^(R/M) (e^((t + d)/M) - 1)) at interval t (Daly's equation for the expected wall time).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.catalog.rules import of_kind, positive
from utils.planner.cluster import Cluster

DAY = 86_400.0


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
    """

    share: tuple[float, float]
    seconds_between_failures: tuple[float, float]
    checkpoint_interval_seconds: tuple[float, float]


def best_interval_seconds(checkpoint_seconds: float, mean_seconds_between_failures: float) -> float:
    """Daly's optimum of seconds of work between two checkpoints (Daly 2006, equation 37)."""
    d, m = checkpoint_seconds, mean_seconds_between_failures
    if d >= 2 * m:
        return m
    x = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(x) / 3 + x / 9) - d


def working_share(
    interval: float, checkpoint_seconds: float, restart_seconds: float, mean_seconds: float
) -> float:
    """Share of wall time that is work, at a checkpoint interval; all in seconds."""
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
) -> Goodput:
    """What failures leave of a run on a cluster that checkpoints at the best interval.

    Args:
        cluster: The machines; more nodes fail more often.
        rate: Failures per 1,000 node-days.
        checkpoint_seconds: What one checkpoint stops the training for, written asynchronously.
        restart_seconds: From a failure to training again, lost work aside.

    Raises:
        ValueError: a time below 1 second.
    """
    of_kind("goodput", cluster=(cluster, Cluster), rate=(rate, FailureRate))
    positive("goodput", checkpoint_seconds=checkpoint_seconds, restart_seconds=restart_seconds)
    means = [1000 * DAY / (r * cluster.nodes) for r in (rate.high, rate.low)]
    intervals = [best_interval_seconds(checkpoint_seconds, m) for m in means]
    shares = [
        working_share(t, checkpoint_seconds, restart_seconds, m)
        for t, m in zip(intervals, means, strict=True)
    ]
    return Goodput((shares[0], shares[1]), (means[0], means[1]), (intervals[0], intervals[1]))
