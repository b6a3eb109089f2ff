"""What the planner says of seven schemes on 64 GPUs: peak, what a node sends, and speed beside unsharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from utils.catalog import ModelShape
from utils.planner import Batch, Cluster, Estimate, Framework, Plan, axis_bytes, estimate, framework
from utils.planner.step_seconds.collectives import Group
from utils.units import GB

NODES, GPUS, GPUS_A_NODE = 8, 64, 8
RATES_GB = (
    200,
    25,
    1.25,
)  # that a node sends in a second: a fast network, a slower one, a slow one

# The course's model, where it holds less than transformers' (the planner's convention): nn.RMSNorm
# keeps no fp32 copy of its input, and the loss ends at 12 bytes a logit.
_COURSE_MODEL = {"eager_norm": False, "loss_bytes": 12}
_FSDP = replace(framework("fsdp"), name="fsdp, bf16 gradients", reduce_bytes=2, **_COURSE_MODEL)
_DEEPSPEED = replace(
    framework("deepspeed"),
    name="deepspeed, all ports, buckets of 5e7",
    one_port=False,
    fixed_buffer_bytes=2e8,
    **_COURSE_MODEL,
)


class Scheme(NamedTuple):
    """What divides the states, and over how many ranks.

    Attributes:
        framework: The planner's conventions.
        stage: Of ZeRO; FSDP2 is 3.
        shard_ranks: Ranks that share the states; None for all. Fewer is HSDP.
    """

    framework: Framework
    stage: int
    shard_ranks: int | None = None

    def plan(self, micro_batch: int) -> Plan:
        """On 64 ranks."""
        return Plan(
            dp=GPUS,
            zero_stage=self.stage,
            shard_ranks=self.shard_ranks,
            framework=self.framework,
            micro_batch=micro_batch,
        )


# All reduce gradients in bf16. The first is FSDP2 on a mesh of 64 x 1, which shards nothing.
UNSHARDED, HSDP = "unsharded", "HSDP 8 x 8"
SCHEMES: dict[str, Scheme] = {
    UNSHARDED: Scheme(_FSDP, 0),
    "ZeRO-1": Scheme(_DEEPSPEED, 1),
    # use_multi_rank_bucket_allreduce=False; in as few calls as by default, so at its fastest.
    "ZeRO-1 to owners": Scheme(replace(_DEEPSPEED, name="owners", whole_gradients=False), 1),
    "ZeRO-2": Scheme(_DEEPSPEED, 2),
    "ZeRO-3": Scheme(_DEEPSPEED, 3),
    "FSDP2": Scheme(_FSDP, 3),
    HSDP: Scheme(_FSDP, 3, GPUS_A_NODE),
}


def with_fp32_gradients(scheme: Scheme) -> Scheme:
    """The same, with gradients reduced in fp32, as FSDP2 does in this lesson and in its job."""
    rules = scheme.framework
    return scheme._replace(
        framework=replace(rules, name=f"{rules.name}, fp32 gradients", reduce_bytes=4)
    )


def told(shape: ModelShape, batch: Batch, plan: Plan, network_gb: float) -> Estimate:
    """The planner's estimate on 64 A100-40GB whose nodes send so many GB in a second."""
    return estimate(shape, _cluster(network_gb), plan, batch)


def peak_gb(shape: ModelShape, batch: Batch, plan: Plan) -> float:
    """Of one GPU, as the planner reckons."""
    return told(shape, batch, plan, RATES_GB[0]).peak.allocated_bytes / GB


def speed(shape: ModelShape, batch: Batch, plan: Plan, network_gb: float) -> float:
    """Tokens per second of one GPU."""
    return told(shape, batch, plan, network_gb).tokens_per_second / GPUS


def peaks(shape: ModelShape, batch: Batch, micro_batch: int) -> dict[str, float]:
    """By scheme, GB of one GPU at its peak."""
    return {
        name: peak_gb(shape, batch, scheme.plan(micro_batch)) for name, scheme in SCHEMES.items()
    }


def speeds(
    shape: ModelShape, batch: Batch, micro_batch: int, networks_gb: Sequence[float]
) -> dict[str, list[float]]:
    """By scheme, tokens per second of a GPU at each rate of the network."""
    plans = {name: scheme.plan(micro_batch) for name, scheme in SCHEMES.items()}
    return {
        name: [speed(shape, batch, plan, gb) for gb in networks_gb] for name, plan in plans.items()
    }


def scheme_rows(
    shape: ModelShape, batch: Batch, schemes: Mapping[str, Scheme], micro_batch: int
) -> list[dict[str, str | float]]:
    """A row for each scheme, beside the first one's speed.

    Its peak, what a node sends, what a step on the fastest network loses to collectives and to the
    optimizer, and tokens per second of a GPU by the network's rate.
    """
    plans = {name: scheme.plan(micro_batch) for name, scheme in schemes.items()}
    first = next(iter(plans.values()))
    rows: list[dict[str, str | float]] = []
    for name, plan in plans.items():
        seconds = told(shape, batch, plan, RATES_GB[0]).time
        row: dict[str, str | float] = {
            "": name,
            "peak, GB": peak_gb(shape, batch, plan),
            "node sends, GB": node_bytes(shape, batch, plan) / GB,
            "collectives cost, ms": round(1000 * seconds.data_parallel),
            "optimizer, ms": round(1000 * seconds.optimizer),
        }
        for rate in RATES_GB:
            own, its = (speed(shape, batch, each, rate) for each in (plan, first))
            row[f"tokens/s at {rate:g} GB/s"] = f"{own:,.0f} ({own / its - 1:+.1%})"
        rows.append(row)
    return rows


def line_share(network_gb: float) -> float:
    """Of the line rate, what the planner lets a ring over all nodes use."""
    cluster = _cluster(network_gb)
    return Group(GPUS).network_bytes_per_second(cluster) / cluster.network_bytes_per_second


def _cluster(network_gb: float) -> Cluster:
    return Cluster(gpu="A100-40GB", nodes=NODES, network_bytes_per_second=network_gb * GB)


def node_bytes(shape: ModelShape, batch: Batch, plan: Plan) -> float:
    """Bytes that a node of eight sends to other nodes in a step.

    A ring over all ranks enters and leaves a node once, so what a rank sends leaves the node once.
    Where a node's ranks share the states (HSDP), each of them is in a ring of its own over the nodes.
    """
    (sent,) = axis_bytes(shape, plan, batch)
    if 1 < plan.dims.shard <= GPUS_A_NODE:
        return GPUS_A_NODE * sent["replicate"]
    return sent["shard"] + sent["replicate"]
