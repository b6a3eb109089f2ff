"""A step of 1.3B on 64 GPUs: its passes, its optimizer, and its collectives as a simulated rank called them.

The page adds them up; here stand the parts. Rates and starts of collectives, the two passes and the
optimizer are the planner's; calls and bytes are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from utils.catalog import ModelShape
from utils.checked import check_public
from utils.planner import Batch, Cluster, Plan, calibration, framework
from utils.planner.plan_context import ClusterPlanContext
from utils.planner.step_seconds.block_time import block_times, head_time, loss_time
from utils.planner.step_seconds.collectives import (
    NETWORK_HOP_SECONDS,
    NVLINK_HOP_SECONDS,
    RING_PLATEAU,
    bandwidth_in_training,
)
from utils.planner.step_seconds.kernels import memory_seconds
from utils.planner.step_seconds.step_end import ADAM_BYTES, CLIP_BYTES
from utils.traffic.collectives import Traffic
from utils.units import GB

from .ways import SINGLE_NUMBERS_BYTES, ring_bytes

NODES, GPUS, GPUS_A_NODE = 8, 64, 8
COUNTED = 2  # micro-batches of the simulated step
# The course's model keeps less than transformers': nn.RMSNorm no fp32 copy, the loss 12 bytes a logit.
_MODEL = {"eager_norm": False, "loss_bytes": 12}


class Scheme(NamedTuple):
    """What divides the states, and over how many ranks: optimizer state, and gradients."""

    stage: int
    shard_ranks: int = GPUS


UNSHARDED, HSDP = "unsharded", "HSDP 8 x 8"
SCHEMES: dict[str, Scheme] = {
    UNSHARDED: Scheme(0, 1),
    "ZeRO-1": Scheme(1),
    "ZeRO-2": Scheme(2),
    "ZeRO-3": Scheme(3),
    "FSDP2": Scheme(3),
    "FSDP2 kept": Scheme(3),
    HSDP: Scheme(3, GPUS_A_NODE),
}


class Part(NamedTuple):
    """Collectives of one kind that run beside one pass, as one rank calls them.

    Attributes:
        collective: As it is called.
        beside: "forward" or "backward"; "step" where no pass hides it.
        each: in each micro-batch; else once a step.
        link: "NVLink" in a node; "node" where one ring leaves a node by all its ports; "port" where
            each GPU of a node is in a ring of its own.
        sent_gb: in GB.
        calls: how many.
        start_ms: of one call.
    """

    collective: str
    beside: str
    each: bool
    link: str
    sent_gb: float
    calls: float
    start_ms: float


class Rates(NamedTuple):
    """What the planner assumes of links, of calls, and of what runs beside them.

    Attributes:
        contention: Of the seconds of a hidden collective, what compute loses.
        nvlink_gb: GB that a GPU sends in a second inside of a node.
        network: Factor on what a network carries, `network_share` of its line rate.
        start: Factor on the start of a call.
        optimizer: Factor on the optimizer's time.
    """

    contention: float
    nvlink_gb: float
    network: float = 1.0
    start: float = 1.0
    optimizer: float = 1.0

    def link_gb(self, link: str, network_gb: float) -> float:
        """GB in a second on a link, where a node's line rate is `network_gb`."""
        node = network_gb * network_share(network_gb) * self.network
        ring = min(node, self.nvlink_gb)  # it runs inside of nodes, too
        return {"NVLink": self.nvlink_gb, "node": ring, "port": node / GPUS_A_NODE}[link]


def cluster(network_gb: float) -> Cluster:
    """The scenario's: 8 nodes of 8 A100 of 40 GB, behind a network of that line rate a node."""
    return Cluster(gpu="A100-40GB", nodes=NODES, network_bytes_per_second=network_gb * GB)


def network_share(network_gb: float) -> float:
    """Of a network's line rate, what a collective reaches inside a training step."""
    return cluster(network_gb).network_share * calibration.BESIDE_TRAINING


PLANNER = Rates(
    contention=calibration.CONTENTION,
    nvlink_gb=bandwidth_in_training(cluster(200).device.peer_link) / GB,
)


def stretched() -> dict[str, Rates]:
    """The planner's rates with one of them halved, and doubled."""
    return {
        f"{name} x {factor:g}": PLANNER._replace(**{name: factor * value})
        for name, value in PLANNER._asdict().items()
        for factor in (0.5, 2.0)
    }


def passes_ms(shape: ModelShape, batch: Batch, micro_batch: int) -> dict[str, float]:
    """Of one micro-batch, by the planner; the step's own phase hides nothing."""
    rules = replace(framework("fsdp"), name="fsdp, the course's model", **_MODEL)
    plan = Plan(dp=GPUS, zero_stage=3, framework=rules, micro_batch=micro_batch)
    setup = ClusterPlanContext(shape, plan, batch, cluster(200))
    dense, _ = block_times(setup)
    time = dense.times(shape.layers) + (head_time(setup) + loss_time(setup))
    return {
        "forward": 1000 * time.forward.total,
        "backward": 1000 * time.backward.total,
        "step": 0.0,
    }


def optimizer_ms(scheme: Scheme, count: int, rates: Rates = PLANNER) -> float:
    """Of clipping and Adam on a rank's part of so many parameters, by the planner."""
    owned = count / scheme.shard_ranks
    held = count if scheme.stage < 2 else owned
    moved = ADAM_BYTES * owned + CLIP_BYTES * held
    return rates.optimizer * 1000 * memory_seconds(cluster(200).device, moved)


def parts(scheme: Scheme, calls: Iterable[Traffic], count: int) -> list[Part]:
    """What a rank called in a step of `COUNTED` micro-batches, by the pass that it runs beside.

    Stage 1, and the rings between nodes, reduce once a step, beside the last backward. Stages 1 and 2
    gather once, when the step is over. Of what stage 3 gathers in a micro-batch each parameter once is
    forward's, and the rest backward's.
    """
    found: list[Part] = []
    for row in calls:
        between, gathers = row.axis.endswith("replicate"), row.collective == "all-gather"
        ranks = GPUS // scheme.shard_ranks if between else scheme.shard_ranks
        if row.at_startup or ranks == 1 or row.payload_bytes <= SINGLE_NUMBERS_BYTES * row.calls:
            continue
        each = not between and scheme.stage >= (3 if gathers else 2)
        times = COUNTED if each else 1
        sent_gb = sum(ring_bytes([row], ranks).values()) / GB / times
        beside = "backward" if not gathers else "forward" if each else "step"
        link = (
            "NVLink" if ranks == GPUS_A_NODE and not between else "port" if ranks < GPUS else "node"
        )
        start_ms = 1000 * _start_seconds(ranks, link, row.collective)
        part = Part(row.collective, beside, each, link, sent_gb, row.calls / times, start_ms)
        once_gb = 2 * count * (ranks - 1) / ranks / GB
        found += _by_pass(part, once_gb) if beside == "forward" else [part]
    return found


def _by_pass(part: Part, once_gb: float) -> list[Part]:
    """Gathers of a micro-batch: each parameter once is forward's, and what is left backward's."""
    share = min(1.0, once_gb / part.sent_gb)
    if share > 0.99:  # kept until backward; alignment aside
        return [part]
    return [
        part._replace(beside=beside, sent_gb=of * part.sent_gb, calls=of * part.calls)
        for beside, of in (("forward", share), ("backward", 1 - share))
    ]


def _start_seconds(ranks: int, link: str, collective: str) -> float:
    """Of one call: launching it, and the hops of its ring, as the planner counts them."""
    nodes = 1 if link == "NVLink" else NODES
    hops = (ranks - nodes) * NVLINK_HOP_SECONDS + (nodes - 1) * NETWORK_HOP_SECONDS
    rounds = 2 * (RING_PLATEAU if nodes > 1 else 1) if collective == "all-reduce" else 1
    return calibration.CALL_SECONDS + rounds * hops


def two_levels(hybrid: Sequence[Part]) -> list[Part]:
    """Unsharded's all-reduce in two levels, of HSDP's calls: in the node, between nodes, and back."""
    (between,) = (part for part in hybrid if part.link == "port")
    (inside,) = (part for part in hybrid if part.collective == "reduce-scatter")
    return [between, *[inside._replace(each=False)] * 2]


__all__ = [
    "HSDP",
    "PLANNER",
    "SCHEMES",
    "UNSHARDED",
    "Part",
    "Rates",
    "Scheme",
    "cluster",
    "network_share",
    "optimizer_ms",
    "parts",
    "passes_ms",
    "stretched",
    "two_levels",
]

check_public(globals())
