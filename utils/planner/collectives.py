"""Seconds of collectives: bytes over the slowest link they cross, and a latency for each hop.

The alpha-beta model (Hockney 1994) of ring algorithms (Thakur et al. 2005): over n ranks an
all-gather or reduce-scatter passes (n - 1)/n of the whole through every link in n - 1 hops, an
all-reduce twice that. Only the hops that leave a node cost the latency between nodes: one less than
the nodes, as NCCL's own model counts them (src/graph/tuning.cc, nInterSteps). Between nodes NCCL
takes trees for an all-reduce, up and down log2 n levels, each of which waits for a buffer to fill.
A ring that visits g ranks of each node enters and leaves it once, over the g network ports of these
ranks together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from utils.planner import calibration
from utils.planner.cluster import Cluster
from utils.units import MIB

NCCL_BUFFER_BYTES = 4 * MIB  # NCCL documentation, NCCL_BUFFSIZE
NVLINK_HOP_SECONDS = 3.4e-6  # NCCL, src/graph/tuning.cc: hwLat of a ring over NVLink, Simple


@dataclass(frozen=True)
class Group:
    """Ranks that talk to one another.

    Attributes:
        ranks: How many.
        stride: Distance between neighbours in the order of ranks; 1 for tensor parallelism.
        one_port: Between nodes it runs at one network port's rate.
    """

    ranks: int
    stride: int = 1
    one_port: bool = False

    def per_node(self, cluster: Cluster) -> int:
        """Ranks of the group in one node."""
        return max(1, min(self.ranks, cluster.gpus_per_node // self.stride))

    def nodes(self, cluster: Cluster) -> int:
        """Nodes that the group spans."""
        return math.ceil(self.ranks / self.per_node(cluster))

    def bus_bytes_per_second(self, cluster: Cluster) -> float:
        """Sustained bandwidth of the group's ring, one direction."""
        link = cluster.node_link_bytes_per_second * calibration.LINK_SUSTAINED
        if self.nodes(cluster) == 1:
            return link
        ports = 1 if self.one_port else self.per_node(cluster)
        network = ports * cluster.network_bytes_per_second_per_gpu
        return min(link, network * calibration.LINK_SUSTAINED)


def all_gather_seconds(
    cluster: Cluster, group: Group, whole_bytes: float, calls: float = 1
) -> float:
    """An all-gather (or reduce-scatter) whose whole is `whole_bytes`, in that many calls."""
    if group.ranks == 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    bandwidth = share * whole_bytes / group.bus_bytes_per_second(cluster)
    return bandwidth + calls * _ring_seconds(cluster, group)


def all_reduce_seconds(
    cluster: Cluster, group: Group, whole_bytes: float, calls: float = 1
) -> float:
    """An all-reduce of `whole_bytes`, in that many calls."""
    if group.ranks == 1:
        return 0.0
    share = 2 * (group.ranks - 1) / group.ranks
    bandwidth = share * whole_bytes / group.bus_bytes_per_second(cluster)
    if group.nodes(cluster) == 1:
        return bandwidth + calls * 2 * _ring_seconds(cluster, group)
    levels = math.ceil(math.log2(group.ranks))
    port = cluster.network_bytes_per_second_per_gpu * calibration.LINK_SUSTAINED
    waits = 2 * levels * NCCL_BUFFER_BYTES / port
    return bandwidth + calls * (calibration.CALL_SECONDS + waits)


def send_seconds(cluster: Cluster, crosses_nodes: bool, sent_bytes: float) -> float:
    """One rank sends to another, of its own node or of another one."""
    if not crosses_nodes:
        link = cluster.node_link_bytes_per_second * calibration.LINK_SUSTAINED
        return sent_bytes / link + NVLINK_HOP_SECONDS
    port = min(cluster.network_bytes_per_second_per_gpu, cluster.node_link_bytes_per_second)
    return sent_bytes / (port * calibration.LINK_SUSTAINED) + calibration.HOP_SECONDS


@lru_cache(maxsize=10_000)
def hops_across_nodes(gpus_per_node: int, stride: int, stages: int) -> tuple[bool, ...]:
    """Whether each hop of a pipeline leaves a node: stage to stage, then from last to first.

    Stages lie `stride` ranks apart. A hop leaves its node where it does for any rank of the stage:
    with 16 stages of 4 ranks on nodes of 8 every second one does.
    """
    starts = [stage * stride for stage in range(stages)]
    ends = [*starts[1:], 0]
    return tuple(
        any((start + rank) // gpus_per_node != (end + rank) // gpus_per_node
            for rank in range(min(stride, gpus_per_node)))
        for start, end in zip(starts, ends, strict=True)
    )  # fmt: skip


def _ring_seconds(cluster: Cluster, group: Group) -> float:
    """Latency of a pass around a ring: its start and its hops."""
    across = group.nodes(cluster) - 1
    inside = group.ranks - 1 - across
    hops = inside * NVLINK_HOP_SECONDS + across * calibration.HOP_SECONDS
    return calibration.CALL_SECONDS + hops
