"""Failures of large runs: Llama 3's 54 days, and Meta's RSC clusters."""

from __future__ import annotations

from dataclasses import dataclass

from evidence.validation.tables import table, whole
from utils.planner import Cluster, goodput

HOUR = 3600.0
LLAMA_3_DAYS, LLAMA_3_NODES, LLAMA_3_EFFECTIVE = 54, 2048, 0.90


@dataclass(frozen=True)
class Interval:
    """A published number and the interval that we state for it."""

    case: str
    published: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Whether it lies within."""
        return self.low <= self.published <= self.high


def intervals() -> list[Interval]:
    """Hours between failures, and Llama 3's share of effective training time."""
    failures = sum(whole(row["count"]) for row in table("llama3_failures"))
    hours = 24 * LLAMA_3_DAYS / failures
    found = [_hours("Llama 3, 16,384 GPUs", hours, LLAMA_3_NODES)]
    for row in table("rsc_reliability"):
        words = row["quantity"].split()
        if words[0] == "MTTF":
            found.append(_hours(f"RSC-1, {words[1]} GPUs", float(row["value"]), int(words[1]) // 8))
    share = goodput(Cluster(gpu="H100", nodes=LLAMA_3_NODES)).share
    return [*found, Interval("Llama 3, effective training time", LLAMA_3_EFFECTIVE, *share)]


def _hours(case: str, published: float, nodes: int) -> Interval:
    low, high = goodput(Cluster(gpu="H100", nodes=nodes)).seconds_between_failures
    return Interval(f"{case}: hours between failures", published, low / HOUR, high / HOUR)
