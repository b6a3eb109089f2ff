"""Days and dollars of a run."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog import Price, price, read_prices
from utils.catalog.age import day_of
from utils.planner.cluster import Cluster
from utils.planner.goodput import DAY, Goodput, checkpoint_bytes, goodput
from utils.planner.plan_estimate import Estimate
from utils.rules import keep_whole, of_kind, positive
from utils.units import GB, format_seconds

DAYS_A_MONTH = 365.25 / 12


@dataclass(frozen=True)
class Storage:
    """Where a run's checkpoints lie until it ends.

    Attributes:
        usd_per_gb_month: US dollars for 1e9 bytes and one month.
        checkpoints: How many are kept at once: the last one, the one before it in case it is
            damaged, and one that is being written.
        source: Where the price was read.
        as_of: The day.
    """

    usd_per_gb_month: float = 0.145
    checkpoints: int = 3
    source: str = "c3x.dev/resources/aws/aws_fsx_lustre_file_system: Lustre on SSD, 125 MB/s a TiB"
    as_of: str = "2026-11-25"

    def __post_init__(self) -> None:
        """Raises ValueError for a price below 0, or no checkpoint."""
        positive("storage", least=0, usd_per_gb_month=self.usd_per_gb_month)
        keep_whole(self, "storage", "checkpoints")
        day_of(self.as_of, "storage")

    def usd_per_day(self, plan: Estimate) -> float:
        """Dollars of a day for the checkpoints of a plan."""
        held = self.checkpoints * checkpoint_bytes(plan.model, plan.plan) / GB
        return held * self.usd_per_gb_month / DAYS_A_MONTH


@dataclass(frozen=True)
class Cost:
    """What training on a number of tokens takes.

    Attributes:
        tokens: How many.
        days: Wall time in the middle of the goodput's range.
        days_interval: With the goodput's range and the interval of step times.
        gpu_hours: Of all GPUs together, at `days`, those of the spare nodes included.
        usd: Dollars at `days`: GPUs, spare nodes and storage.
        usd_interval: Dollars at both ends of `days_interval`.
        usd_per_million_tokens: The same, per 1e6 tokens.
        usd_per_gpu_hour: The price that was used.
        price_source: Where the price is from.
        storage_usd: What of `usd` is for checkpoints.
    """

    tokens: float
    days: float
    days_interval: tuple[float, float]
    gpu_hours: float
    usd: float
    usd_per_million_tokens: float
    usd_per_gpu_hour: float
    price_source: str
    usd_interval: tuple[float, float] = (0.0, 0.0)
    storage_usd: float = 0.0


def cost(
    estimate: Estimate, tokens: float, failures: Goodput | None = None, storage: Storage = Storage()
) -> Cost:
    """Days and dollars of training on so many tokens.

    Args:
        estimate: What `estimate` or `search` gave.
        tokens: Tokens of the whole run.
        failures: What failures leave; by default `goodput` of the cluster. Its spare nodes are paid
            like the others: they are rented, and wait. So is the time of restarts.
        storage: What keeping checkpoints costs.

    Raises:
        ValueError: fewer than 1 token, a GPU without a price, or failures that leave no time.
    """
    of_kind(
        "cost",
        estimate=(estimate, Estimate),
        failures=(failures, Goodput, type(None)),
        storage=(storage, Storage),
    )
    positive("cost", tokens=tokens)
    left = goodput(estimate.cluster) if failures is None else failures
    if not left.share[0]:
        raise ValueError(
            f"cost: failures come every {format_seconds(left.seconds_between_failures[0])} and "
            "leave no time to train. Use fewer nodes, or pass failures=goodput(...) with a lower "
            "rate or a shorter restart."
        )
    share = sum(left.share) / 2
    bare = tokens / estimate.tokens_per_second / DAY
    low, high = (seconds / estimate.step_seconds for seconds in estimate.step_seconds_interval)
    interval = bare * low / left.share[1], bare * high / left.share[0]
    paid = estimate.cluster.gpus + (left.spares or 0) * estimate.cluster.gpus_per_node
    hours = 24 * bare / share * paid
    dollars, source = hourly_price(estimate.cluster)
    kept = storage.usd_per_day(estimate)
    daily = 24 * paid * dollars + kept
    usd, between = daily * bare / share, (daily * interval[0], daily * interval[1])
    return Cost(
        tokens,
        bare / share,
        interval,
        hours,
        usd,
        1e6 * usd / tokens,
        dollars,
        source,
        between,
        kept * bare / share,
    )


def hourly_price(cluster: Cluster) -> tuple[float, str]:
    """US dollars of one GPU hour and where they are from: the cluster's, else the lowest listed.

    A cluster of several nodes takes the lowest price of whole nodes, where one is listed: a cheaper
    card may come alone, without a network that trains.

    Raises:
        ValueError: neither the cluster nor the price list has one.
    """
    if cluster.usd_per_gpu_hour is not None:
        kind = "" if cluster.pricing == "on demand" else f", {cluster.pricing}"
        return cluster.usd_per_gpu_hour, f"given with the cluster{kind}"
    row = node_price(cluster)
    return row.usd_per_gpu_hour, row.origin()


def node_price(cluster: Cluster) -> Price:
    """The lowest listed price of the cluster's kind, of whole nodes where there is one.

    Raises:
        ValueError: the list has none.
    """
    lowest = price(cluster.device.name, kind="spot" if cluster.pricing == "spot" else None)
    alike = [row for row in read_prices() if row.gpu == lowest.gpu and row.kind == cluster.pricing]
    whole = [
        row for row in alike if row.instance_gpus >= cluster.gpus_per_node and row.fabric != "no"
    ]
    return min(whole or alike or [lowest], key=lambda row: row.usd_per_gpu_hour)
