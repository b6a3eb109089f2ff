"""What the planner says of six schemes on 64 GPUs: peak, what a node sends to the others, and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from utils.catalog import ModelShape
from utils.planner import Batch, Cluster, Estimate, Framework, Plan, axis_bytes, estimate, framework
from utils.planner.step_time.collectives import Group
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


# All reduce gradients in bf16. DDP is FSDP2 that shards nothing: it computes in bf16, without autocast.
SCHEMES: dict[str, Scheme] = {
    "DDP": Scheme(_FSDP, 0),
    "ZeRO-1": Scheme(_DEEPSPEED, 1),
    "ZeRO-2": Scheme(_DEEPSPEED, 2),
    "ZeRO-3": Scheme(_DEEPSPEED, 3),
    "FSDP2": Scheme(_FSDP, 3),
    "HSDP 8 x 8": Scheme(_FSDP, 3, GPUS_A_NODE),
}
# The same two as PyTorch does it unless told otherwise.
FP32_GRADIENTS: dict[str, Scheme] = {
    name: SCHEMES[name]._replace(framework=replace(_FSDP, name="fsdp, fp32", reduce_bytes=4))
    for name in ("DDP", "HSDP 8 x 8")
}


def told(shape: ModelShape, batch: Batch, plan: Plan, network_gb: float) -> Estimate:
    """The planner's estimate on 64 A100-40GB whose nodes send so many GB in a second."""
    return estimate(shape, _cluster(network_gb), plan, batch)


def peak_gb(shape: ModelShape, batch: Batch, plan: Plan) -> float:
    """Of one GPU, as the planner reckons."""
    return told(shape, batch, plan, RATES_GB[0]).peak.allocated_bytes / GB


def speed(shape: ModelShape, batch: Batch, plan: Plan, network_gb: float) -> float:
    """Tokens per second of one GPU."""
    return told(shape, batch, plan, network_gb).tokens_per_second / GPUS


def costs(shape: ModelShape, batch: Batch, micro_batch: int) -> dict[str, tuple[float, float]]:
    """By scheme, GB that a node sends in a step, and GB of one GPU at its peak."""
    plans = {name: scheme.plan(micro_batch) for name, scheme in SCHEMES.items()}
    return {
        name: (node_bytes(shape, batch, plan) / GB, peak_gb(shape, batch, plan))
        for name, plan in plans.items()
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
    """A row for each scheme: its peak, what a node sends, and speed by the network's rate."""
    return [_row(name, shape, batch, scheme.plan(micro_batch)) for name, scheme in schemes.items()]


def _row(name: str, shape: ModelShape, batch: Batch, plan: Plan) -> dict[str, str | float]:
    row: dict[str, str | float] = {
        "": name,
        "peak, GB": peak_gb(shape, batch, plan),
        "node sends, GB": node_bytes(shape, batch, plan) / GB,
    }
    for rate in RATES_GB:
        row[f"tokens/s/GPU at {rate:g} GB/s"] = f"{speed(shape, batch, plan, rate):,.0f}"
    return row


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
