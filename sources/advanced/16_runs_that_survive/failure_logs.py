"""Published counts of failures on GPU clusters, and what a count says of the rate behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from utils.rules import positive, whole

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class FailureLog:
    """What a cluster's owners reported.

    Attributes:
        name: Of the run or cluster.
        failures_per_1000_node_days: Of nodes with 8 GPUs.
        failures: How many were counted; None where the paper gives a rate alone.
        source: The paper, and where in it.
    """

    name: str
    failures_per_1000_node_days: float
    failures: int | None
    source: str

    @property
    def per_gpu_hour(self) -> float:
        return self.failures_per_1000_node_days / (1000 * 24 * GPUS_PER_NODE)

    def hours_between(self, gpus: int) -> float:
        """Mean time between failures of a job on that many GPUs, if each node fails by itself."""
        return 1 / (self.per_gpu_hour * gpus)


def per_1000_node_days(failures: float, gpus: int, days: float) -> float:
    """A count as a rate, for nodes of 8 GPUs."""
    positive("a failure log", gpus=gpus, days=days)
    return 1000 * failures / (gpus / GPUS_PER_NODE * days)


FAILURE_LOGS = (
    FailureLog(
        "Llama 3 405B",
        per_1000_node_days(419, 16_384, 54),
        419,
        "arXiv:2407.21783, Table 5: unexpected interruptions in 54 days on 16,384 GPUs",
    ),
    FailureLog("RSC-1, nodes", 6.5, None, "Kokolis and others 2024, arXiv:2410.21680"),
    FailureLog(
        "RSC-1, jobs of 1,024 GPUs",
        1000 * 24 / 7.9 / 128,
        None,
        "Kokolis and others 2024, arXiv:2410.21680: mean time to failure 7.9 h",
    ),
)


def poisson_interval(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Means that a count of events is compatible with, exactly (Garwood 1936).

    At the lower end, `count` or more would come with probability (1 - confidence) / 2, at the upper
    end `count` or fewer.

    Raises:
        ValueError: a count below zero, or a confidence outside of 0 to 1.
    """
    whole("poisson_interval", least=0, count=count)
    if not 0 < confidence < 1:
        raise ValueError(
            f"confidence is {confidence}; it is a share between 0 and 1, such as 0.95."
        )
    tail = (1 - confidence) / 2
    highest = count + 10 * math.sqrt(count + 1) + 20
    low = _falls(lambda mean: at_most(count - 1, mean) > 1 - tail, highest) if count else 0.0
    return low, _falls(lambda mean: at_most(count, mean) > tail, highest)


def at_most(count: int, mean: float) -> float:
    """Probability of that many events or fewer, of a Poisson number with this mean."""
    if count < 0:
        return 0.0
    if mean == 0:
        return 1.0
    logs = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


def _falls(holds: Callable[[float], bool], highest: float) -> float:
    """Where a condition that holds at 0 stops to hold, by bisection."""
    low, high = 0.0, highest
    while high - low > 1e-9 * highest:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
