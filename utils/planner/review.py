"""A design held against what a reviewer would ask: seven criteria, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog.rules import of_kind, positive
from utils.planner.cost import Cost, cost
from utils.planner.estimate import BYTES_INTERVAL, Estimate
from utils.planner.goodput import Goodput, goodput
from utils.units import format_bytes, format_seconds

# Tokens of one optimizer step: 0.5 million for the smallest GPT-3 (Brown et al. 2020,
# arXiv:2005.14165, Table 2.1), 16 million for Llama 3 405B (arXiv:2407.21783, Table 4).
BATCH_TOKENS = (0.5e6, 16.8e6)
LARGEST_BUBBLE = 0.05
SLOWER_ALLOWED = 0.10
LEAST_GOODPUT = 0.90


@dataclass(frozen=True)
class Criterion:
    """One question of a review.

    Attributes:
        name: What is asked.
        passed: The answer.
        reason: The numbers behind it, in one sentence.
    """

    name: str
    passed: bool
    reason: str


@dataclass(frozen=True)
class Review:
    """What a reviewer says of a design; `print` it.

    Attributes:
        criteria: All questions.
        cost: Days and dollars that were judged.
    """

    criteria: tuple[Criterion, ...]
    cost: Cost

    @property
    def points(self) -> int:
        """Criteria passed."""
        return sum(row.passed for row in self.criteria)

    def __str__(self) -> str:
        lines = [
            f"{'pass' if row.passed else 'FAIL'}  {row.name:<8}{row.reason}"
            for row in self.criteria
        ]
        return "\n".join([*lines, f"{self.points} of {len(self.criteria)}"])


def review(
    design: Estimate, best: Estimate, *, tokens: float, days: float, usd: float,
    failures: Goodput | None = None,
) -> Review:  # fmt: skip
    """Judge a design beside the fastest one known.

    Args:
        design: The plan to defend.
        best: The fastest plan of a search for the same model, cluster and batch.
        tokens: Of the whole run.
        days: The deadline.
        usd: The budget.
        failures: What failures leave; by default `goodput` of the cluster.

    Raises:
        ValueError: `best` is for another model, cluster or batch, or a number is below 1.
    """
    of_kind("review", design=(design, Estimate), best=(best, Estimate))
    positive("review", tokens=tokens, days=days, usd=usd)
    asked = ("model", "cluster", "batch")
    other = [name for name in asked if getattr(design, name) != getattr(best, name)]
    if other:
        raise ValueError(f"design and best differ in {', '.join(other)}; compare like with like.")
    left = goodput(design.cluster) if failures is None else failures
    spent = cost(design, tokens, left)
    rows = (_fits(design), _margin(design), _speed(design, best), _batch(design),
            _deadline(spent, days), _budget(spent, usd), _risk(design, left))  # fmt: skip
    return Review(rows, spent)


def _fits(design: Estimate) -> Criterion:
    needed, room = design.peak.needed_bytes, design.cluster.device.memory_bytes
    reason = f"stage {design.peak.stage.index} needs {format_bytes(needed)} of {format_bytes(room)}"
    return Criterion("fits", design.fits, reason)


def _margin(design: Estimate) -> Criterion:
    """The prediction may be low: 80% of measured peaks lie below its interval's upper end."""
    high = BYTES_INTERVAL[1] * design.peak.needed_bytes
    passed = high <= design.cluster.device.memory_bytes
    reason = f"at the high end of the interval it needs {format_bytes(high)}"
    return Criterion("margin", passed, reason)


def _speed(design: Estimate, best: Estimate) -> Criterion:
    slower = design.step_seconds / best.step_seconds - 1
    reason = (
        f"{format_seconds(design.step_seconds)} a step, {slower:+.1%} beside the fastest plan "
        f"({SLOWER_ALLOWED:.0%} allowed)"
    )
    return Criterion("speed", slower <= SLOWER_ALLOWED, reason)


def _batch(design: Estimate) -> Criterion:
    low, high = BATCH_TOKENS
    tokens = design.batch.tokens
    passed = low <= tokens <= high and design.bubble <= LARGEST_BUBBLE
    reason = (
        f"{tokens / 1e6:.2f}M tokens a step (published runs: {low / 1e6:g}M to {high / 1e6:g}M), "
        f"bubble and sends {design.bubble:.1%} (at most {LARGEST_BUBBLE:.0%})"
    )
    return Criterion("batch", passed, reason)


def _deadline(spent: Cost, days: float) -> Criterion:
    low, high = spent.days_interval
    reason = f"{low:,.0f} to {high:,.0f} days, the deadline is {days:,.0f}"
    return Criterion("time", high <= days, reason)


def _budget(spent: Cost, usd: float) -> Criterion:
    high = spent.usd * spent.days_interval[1] / spent.days
    reason = f"${spent.usd:,.0f}, on the slow side ${high:,.0f}; the budget is ${usd:,.0f}"
    return Criterion("cost", high <= usd, reason)


def _risk(design: Estimate, left: Goodput) -> Criterion:
    slow_tp = design.plan.tp > design.cluster.gpus_per_node
    reason = f"failures leave {left.share[0]:.1%} to {left.share[1]:.1%} of the time; tp " + (
        "leaves the node" if slow_tp else "stays in the node"
    )
    return Criterion("risk", left.share[0] >= LEAST_GOODPUT and not slow_tp, reason)
