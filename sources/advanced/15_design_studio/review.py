"""A design held against what a reviewer would ask: criteria, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from utils.catalog import DEVICES, read_prices
from utils.checked import check_public
from utils.planner.goodput import Goodput, best_interval_seconds, goodput
from utils.planner.plan_estimate import BYTES_INTERVAL, Estimate
from utils.planner.plan_search import SearchSpace, search
from utils.planner.run_cost import Cost, cost, node_price
from utils.rules import of_kind, positive
from utils.units import format_bytes, format_seconds

from .loss import cheapest, compute_share, loss

__all__ = ["Criterion", "Review", "review"]

# Tokens of one optimizer step: 0.5 million for the smallest GPT-3 (Brown et al. 2020,
# arXiv:2005.14165, Table 2.1), 16 million for Llama 3 405B (arXiv:2407.21783, Table 4).
BATCH_TOKENS = (0.5e6, 16.8e6)
LARGEST_BUBBLE = 0.05
SLOWER_ALLOWED = 0.10
LEAST_GOODPUT = 0.90
# A smaller model on more tokens may reach the same predicted loss for less compute. Below this share
# of it the money is better spent so. A larger one on fewer may, too; that one costs more to use.
LEAST_COMPUTE_SHARE = 0.9
CHECKPOINT_SECONDS = 10.0  # that one stops the training for, written asynchronously
QUICK = SearchSpace(zero_stages=(0, 1), virtual_stages=(1,), recompute=("none", "full"))
CHEAPER = 0.05  # another GPU must be cheaper by more than the planner's error to be named
# Beside Daly's interval: up to twice as long or half as long loses little.
INTERVAL_FACTOR = 2.0


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
            f"{'pass' if row.passed else 'FAIL'}  {row.name:<12}{row.reason}"
            for row in self.criteria
        ]
        return "\n".join([*lines, f"{self.points} of {len(self.criteria)}"])


def review(
    design: Estimate,
    best: Estimate,
    *,
    tokens: float,
    days: float,
    usd: float,
    failures: Goodput | None = None,
    spares: int = 0,
    checkpoint_interval_seconds: float | None = None,
) -> Review:
    """Judge a design beside the fastest one known.

    Args:
        design: The plan to defend.
        best: The fastest plan of a search for the same model, cluster and batch.
        tokens: Of the whole run.
        days: The deadline.
        usd: The budget.
        failures: What failures leave; by default `goodput` of the cluster with its spares.
        spares: Nodes that wait for one to fail.
        checkpoint_interval_seconds: The interval that is planned; None for Daly's.

    Raises:
        ValueError: `best` is for another model, cluster or batch, or a number is below 1.
    """
    of_kind("review", design=(design, Estimate), best=(best, Estimate))
    positive("review", tokens=tokens, days=days, usd=usd)
    asked = ("model", "cluster", "batch")
    other = [name for name in asked if getattr(design, name) != getattr(best, name)]
    if other:
        raise ValueError(f"design and best differ in {', '.join(other)}; compare like with like.")
    left = failures or goodput(
        design.cluster, spares=spares, checkpoint_interval_seconds=checkpoint_interval_seconds
    )
    spent = cost(design, tokens, left)
    rows = (
        _fits(design),
        _margin(design),
        _headroom(design),
        _speed(design, best),
        _batch(design),
        _tokens(design, tokens),
        _deadline(spent, days),
        _budget(spent, usd),
        _checkpoints(design, checkpoint_interval_seconds),
        _repair(design, spares),
        _risk(design, checkpoint_interval_seconds),
        _other_gpu(design, spent, tokens, left),
    )
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


def _headroom(design: Estimate) -> Criterion:
    """Near the limit the allocator frees and searches at every step."""
    gpu, held = design.cluster.device, design.peak.device_bytes
    reason = f"with the gaps between blocks {held / gpu.memory_bytes:.0%} of the GPU's memory"
    return Criterion("headroom", not design.tight, reason)


def _tokens(design: Estimate, tokens: float) -> Criterion:
    """What the tokens are worth: the predicted loss, and the cheapest way to it."""
    parameters = design.model.parameter_count
    smaller, more = cheapest(parameters, tokens)
    share = compute_share(parameters, tokens)
    reason = (
        f"{tokens / parameters:.1f} tokens per parameter, predicted loss {loss(parameters, tokens):.3f}; "
        f"{smaller / 1e9:,.0f}B on {more / 1e9:,.0f}B tokens reach it for {share:.0%} of the compute "
        f"(at least {LEAST_COMPUTE_SHARE:.0%}, where that model is smaller)"
    )
    return Criterion("tokens", share >= LEAST_COMPUTE_SHARE or smaller > parameters, reason)


def _checkpoints(design: Estimate, interval: float | None) -> Criterion:
    """Young's and Daly's interval at the high rate of failures."""
    mean = goodput(design.cluster).seconds_between_failures[0]
    best = best_interval_seconds(CHECKPOINT_SECONDS, mean)
    planned = best if interval is None else interval
    passed = best / INTERVAL_FACTOR <= planned <= best * INTERVAL_FACTOR
    reason = (
        f"every {format_seconds(planned)}; with a failure every {format_seconds(mean)} and "
        f"{CHECKPOINT_SECONDS:g} s a checkpoint, every {format_seconds(best)} loses least"
    )
    return Criterion("checkpoints", passed, reason)


def _repair(design: Estimate, spares: int) -> Criterion:
    """A job whose replicas are all needed stands still without a node to take over."""
    without = goodput(design.cluster, spares=spares)
    low, high = without.share
    reason = (
        f"{spares} spare {'node' if spares == 1 else 'nodes'} and 24 h to repair leave {low:.0%} to "
        f"{high:.0%} of the time (at least {LEAST_GOODPUT:.0%})"
    )
    return Criterion("repair", low >= LEAST_GOODPUT, reason)


def _other_gpu(design: Estimate, spent: Cost, tokens: float, left: Goodput) -> Criterion:
    """The same number of another GPU, its best plan, at the lowest price of whole nodes."""
    found = [row for row in (_on(design, name, tokens, left) for name in _priced(design)) if row]
    cheapest = min(found, key=lambda row: row[1].usd, default=None)
    if cheapest is None or cheapest[1].usd >= (1 - CHEAPER) * spent.usd:
        return Criterion("other GPU", True, "no other priced GPU does it for less")
    name, bill = cheapest
    reason = (
        f"{design.cluster.gpus} {name} would take {bill.days:,.0f} days and ${bill.usd:,.0f} at "
        f"${bill.usd_per_gpu_hour} ({bill.price_source})"
    )
    return Criterion("other GPU", False, reason)


def _priced(design: Estimate) -> list[str]:
    """GPUs with NVLink of which whole nodes have a price on demand."""
    rows = [
        row
        for row in read_prices()
        if row.kind == "on demand" and row.instance_gpus >= design.cluster.gpus_per_node
    ]
    names = dict.fromkeys(row.gpu for row in rows)
    mine = design.cluster.device
    return [
        n
        for n in names
        if n in DEVICES
        and DEVICES[n].gpu_link
        and DEVICES[n].name != mine.name
        and DEVICES[n].memory_bytes >= mine.memory_bytes / 2
    ]


def _on(design: Estimate, name: str, tokens: float, left: Goodput) -> tuple[str, Cost] | None:
    cluster = replace(
        design.cluster,
        gpu=name,
        usd_per_gpu_hour=None,
        pricing="on demand",
        interruptions_per_1000_node_days=None,
    )
    cluster = replace(cluster, usd_per_gpu_hour=node_price(cluster).usd_per_gpu_hour)
    source = node_price(cluster)
    best = search(design.model, cluster, design.batch, space=QUICK).best
    if best is None:
        return None
    bill = cost(best, tokens, left)
    return name, replace(bill, price_source=source.origin())


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
    high = spent.days_interval[1]
    reason = f"{spent.days:,.0f} days, on the slow side {high:,.0f}; the deadline is {days:,.0f}"
    return Criterion("time", high <= days, reason)


def _budget(spent: Cost, usd: float) -> Criterion:
    high = spent.usd * spent.days_interval[1] / spent.days
    reason = f"${spent.usd:,.0f}, on the slow side ${high:,.0f}; the budget is ${usd:,.0f}"
    return Criterion("cost", high <= usd, reason)


def _risk(design: Estimate, interval: float | None) -> Criterion:
    left = goodput(design.cluster, checkpoint_interval_seconds=interval)
    slow_tp = design.plan.tp > design.cluster.gpus_per_node
    reason = (
        f"with nodes at hand failures leave {left.share[0]:.1%} to {left.share[1]:.1%}; tp "
        + ("leaves the node" if slow_tp else "stays in the node")
    )
    return Criterion("risk", left.share[0] >= LEAST_GOODPUT and not slow_tp, reason)


check_public(globals())
