"""The fastest plan of a scheme within a share of a card, and what a node sends to the others in it."""

from __future__ import annotations

from typing import NamedTuple

from utils.catalog import ModelShape
from utils.planner import Batch, Cluster, Estimate, Framework, Plan, axis_bytes, estimate
from utils.planner.step_time.collectives import Group, all_gather_seconds
from utils.units import GB

NODES, GPUS, GPUS_A_NODE = 8, 64, 8
SIZES, RECOMPUTE = (1, 2, 4, 8), ("none", "full")
BF16_BYTES = 2
RATES_GB = (200, 1.25)  # a fast network and a slow one


class Scheme(NamedTuple):
    """What divides the states, over how many ranks, and the GB that a plan may take.

    Attributes:
        framework: The planner's conventions, or their name.
        stage: Of ZeRO; FSDP2 is 3.
        limit_gb: The peak's GB at most.
        shard_ranks: Ranks that share the states; None for all. Fewer is HSDP.
    """

    framework: str | Framework
    stage: int
    limit_gb: float = 20
    shard_ranks: int | None = None


def fastest(shape: ModelShape, batch: Batch, scheme: Scheme, network_gb: float) -> Estimate:
    """Of 64 A100-40GB: over micro-batches of 1 to 8, with full recomputation and without.

    Args:
        shape: What is trained.
        batch: Of one step.
        scheme: How its states are divided, and the room.
        network_gb: GB per second that a node sends to others.

    Raises:
        ValueError: no such plan fits.
    """
    cluster = _cluster(network_gb)
    plans = [
        Plan(
            dp=GPUS,
            zero_stage=scheme.stage,
            shard_ranks=scheme.shard_ranks,
            framework=scheme.framework,
            micro_batch=size,
            recompute=again,
        )
        for size in SIZES
        for again in RECOMPUTE
    ]
    found = [estimate(shape, cluster, plan, batch) for plan in plans]
    fits = [e for e in found if e.fits and e.peak.allocated_bytes <= scheme.limit_gb * GB]
    if not fits:
        raise ValueError(
            f"ZeRO stage {scheme.stage}: no plan takes {scheme.limit_gb:g} GB or less."
        )
    return max(fits, key=lambda each: each.tokens_per_second)


def gather_seconds(whole_bytes: float, network_gb: float) -> float:
    """An all-gather over the 64 ranks, as the planner reckons: starts, and a share of the line rate.

    Its ring enters a node once, through all of the node's ports.

    Args:
        whole_bytes: What every rank has in the end.
        network_gb: GB per second that a node takes in from others.
    """
    return all_gather_seconds(_cluster(network_gb), Group(GPUS), whole_bytes)


def _cluster(network_gb: float) -> Cluster:
    return Cluster(gpu="A100-40GB", nodes=NODES, network_bytes_per_second=network_gb * GB)


def scheme_row(shape: ModelShape, batch: Batch, scheme: Scheme) -> dict[str, str | float]:
    """A scheme's states; and by the network's rate its plan, what a node sends, and tokens/s/GPU."""
    found = {rate: fastest(shape, batch, scheme, rate) for rate in RATES_GB}
    first = found[RATES_GB[0]]
    reduces = "bf16" if first.plan.conventions.reduce_bytes == BF16_BYTES else "fp32"
    row: dict[str, str | float] = {"reduces in": reduces, "states, GB": first.peak.state_bytes / GB}
    for rate, each in found.items():
        again = ", recomputed" if each.plan.recompute == "full" else ""
        g = each.plan.micro_batches(batch)
        row |= {
            f"{rate:g} GB/s: plan": f"{each.plan.micro_batch} at once, g = {g}{again}",
            f"peak, GB ({rate:g})": each.peak.allocated_bytes / GB,
            f"node sends, GB ({rate:g})": node_bytes(shape, batch, each.plan) / GB,
            f"tokens/s/GPU ({rate:g})": f"{each.tokens_per_second / GPUS:,.0f}",
        }
    return row


def node_bytes(shape: ModelShape, batch: Batch, plan: Plan) -> float:
    """Bytes that a node of eight sends to other nodes in a step.

    A ring over all ranks enters and leaves a node once, so what a rank sends leaves the node once.
    Where a node's ranks share the states (HSDP), each of them is in a ring of its own over the nodes.
    """
    (sent,) = axis_bytes(shape, plan, batch)
    if 1 < plan.dims.shard <= GPUS_A_NODE:
        return GPUS_A_NODE * sent["replicate"]
    return sent["shard"] + sent["replicate"]


def rates(
    shape: ModelShape, batch: Batch, scheme: Scheme, networks_gb: tuple[float, ...]
) -> list[float]:
    """Tokens per second of a GPU at each rate of the network."""
    return [fastest(shape, batch, scheme, gb).tokens_per_second / GPUS for gb in networks_gb]
