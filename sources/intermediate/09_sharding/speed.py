"""The fastest plan of a scheme within a share of a card, and the rounds that the planner lets it send."""

from __future__ import annotations

from utils.catalog import ModelShape
from utils.planner import Batch, Cluster, Estimate, Framework, Plan, axis_bytes, estimate
from utils.units import GB

NODES, GPUS = 8, 64
SIZES, RECOMPUTE = (1, 2, 4, 8), ("none", "full")
BF16_BYTES = 2
# A fast network and a slow one, each with half and twice its rate; the plan is named at one of them.
RATES_GB, NAMED_GB = (100, 200, 400, 0.625, 1.25, 2.5), 200
MANY = 8  # micro-batches of a step


def fastest(
    shape: ModelShape,
    batch: Batch,
    framework: str | Framework,
    stage: int,
    *,
    network_gb: float,
    limit_gb: float,
) -> Estimate:
    """Of 64 A100-40GB: over micro-batches of 1 to 8, with full recomputation and without.

    Args:
        shape: What is trained.
        batch: Of one step.
        framework: The planner's conventions, or their name.
        stage: Of ZeRO.
        network_gb: GB per second that a node sends to others.
        limit_gb: The peak's GB at most.

    Raises:
        ValueError: no such plan fits.
    """
    cluster = Cluster(gpu="A100-40GB", nodes=NODES, network_bytes_per_second=network_gb * GB)
    plans = [
        Plan(dp=GPUS, zero_stage=stage, framework=framework, micro_batch=size, recompute=again)
        for size in SIZES
        for again in RECOMPUTE
    ]
    found = [estimate(shape, cluster, plan, batch) for plan in plans]
    fits = [each for each in found if each.fits and each.peak.allocated_bytes <= limit_gb * GB]
    if not fits:
        raise ValueError(f"ZeRO stage {stage}: no plan takes {limit_gb:g} GB or less.")
    return max(fits, key=lambda each: each.tokens_per_second)


def scheme_row(
    shape: ModelShape,
    batch: Batch,
    framework: str | Framework,
    stage: int,
    *,
    limit_gb: float,
) -> dict[str, str | float]:
    """A scheme's states in GB, rounds, plan, and tokens per second of a GPU by the network's rate."""
    found = {
        rate: fastest(shape, batch, framework, stage, network_gb=rate, limit_gb=limit_gb)
        for rate in RATES_GB
    }
    plan, peak = found[NAMED_GB].plan, found[NAMED_GB].peak
    again = ", recomputed" if plan.recompute == "full" else ""
    return {
        "states, GB": peak.state_bytes / GB,
        "rounds": planned_rounds(shape, framework, stage, 1),
        f"rounds, g = {MANY}": planned_rounds(shape, framework, stage, MANY),
        f"at {NAMED_GB} GB/s": f"{peak.allocated_bytes / GB:.1f} GB, {plan.micro_batch} at once{again}",
        **{
            f"{rate:g} GB/s": f"{each.tokens_per_second / GPUS:,.0f}"
            for rate, each in found.items()
        },
    }


def planned_rounds(
    shape: ModelShape, framework: str | Framework, stage: int, accumulation: int
) -> float:
    """What the planner lets a rank send in a step, in rounds: all parameters once, in bf16."""
    plan = Plan(dp=GPUS, zero_stage=stage, framework=framework)
    batch = Batch(sequences=GPUS * accumulation, sequence_length=shape.max_sequence)
    (sent,) = axis_bytes(shape, plan, batch)
    return sum(sent.values()) / (BF16_BYTES * shape.parameter_count * (GPUS - 1) / GPUS)
