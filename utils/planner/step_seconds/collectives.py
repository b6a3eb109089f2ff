"""Seconds of collectives: by bytes, ranks in a node and between nodes, ports, latency and chunk.

The alpha-beta model (Hockney 1994) of ring algorithms (Thakur et al. 2005): over n ranks an
all-gather or reduce-scatter passes (n - 1)/n of the whole through every link in n - 1 hops, an
all-reduce twice that. Only the hops that leave a node cost the latency between nodes: one less than
the nodes, as NCCL's own model counts them (src/graph/tuning.cc, nInterSteps). Between nodes NCCL
also has trees for an all-reduce: down and up a chain in the node and log2 of the nodes' levels
between them (the same file, latencies of NCCL_ALGO_TREE), each of which waits for one chunk. It
takes the cheaper of the two for the size (`ncclTopoGetAlgoTime`), and so does this.

A ring that visits g ranks of each node enters and leaves it once, over the network ports of these
ranks together. What links reach of their line rate is `catalog.SUSTAINED`, by kind of link, and
inside a training step `calibration.BESIDE_TRAINING` of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from utils.catalog import Link
from utils.planner import calibration
from utils.planner.cluster import Cluster
from utils.units import KIB, MIB

NCCL_BUFFER_BYTES = 4 * MIB  # NCCL documentation, NCCL_BUFFSIZE
NCCL_STEPS = 8  # NCCL, src/include/device.h
# A tree passes on one step of the buffer at a time, a ring four (NCCL, src/enqueue.cc: chunkSteps is
# 1 but for rings). Neither is ever more than the message.
TREE_CHUNK_BYTES = NCCL_BUFFER_BYTES / NCCL_STEPS
LEAST_CHUNK_BYTES, CHUNKS_A_CHANNEL = 32 * KIB, 8
# The same file: a tree's bandwidth beside a ring's, and the latency of a ring between nodes, which
# does not rise by hop alone ("plateau effect of ring", devices from A100 on).
TREE_SHARE, RING_PLATEAU = 0.92, 1.4
CHANNELS_A_PORT = 2  # NCCL, src/graph/connect.cc: channels are doubled
# One thread block copies a chunk at 12 GB/s (src/graph/tuning.cc, comment on hwLat of Tree/Simple).
BLOCK_BYTES_PER_SECOND = 12e9
# All of what follows is hwLat of NCCL 2.20.3, protocol Simple (src/graph/tuning.cc, commit b647562):
# a ring's hop over NVLink, over PCIe and over InfiniBand, and a tree's, which passes on a chunk.
NVLINK_HOP_SECONDS, PCIE_HOP_SECONDS, NETWORK_HOP_SECONDS = 3.4e-6, 5.7e-6, 14e-6
CHUNK_HOP_SECONDS = 28e-6


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

    def network_bytes_per_second(self, cluster: Cluster) -> float:
        """Sustained, of the ports that the group's ranks of one node have together."""
        fair = self.per_node(cluster) * cluster.network_bytes_per_second_per_gpu
        line = min(fair, cluster.port_bytes_per_second) if self.one_port else fair
        return line * cluster.network_share * calibration.BESIDE_TRAINING

    def bus_bytes_per_second(self, cluster: Cluster) -> float:
        """Sustained bandwidth of the group's ring, one direction."""
        link = bandwidth_in_training(cluster.device.peer_link)
        if self.nodes(cluster) == 1:
            return link
        return min(link, self.network_bytes_per_second(cluster))


def bandwidth_in_training(link: Link) -> float:
    """Bytes per second that a link carries inside a training step, one direction."""
    return link.sustained_bytes_per_second * calibration.BESIDE_TRAINING


def all_gather_seconds(
    cluster: Cluster, group: Group, whole_bytes: float, calls: float = 1
) -> float:
    """An all-gather (or reduce-scatter) whose whole is `whole_bytes`, in that many calls."""
    if group.ranks == 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    bandwidth = share * whole_bytes / group.bus_bytes_per_second(cluster)
    return bandwidth + calls * (calibration.CALL_SECONDS + _ring_seconds(cluster, group))


def all_reduce_seconds(
    cluster: Cluster, group: Group, whole_bytes: float, calls: float = 1
) -> float:
    """An all-reduce of `whole_bytes`, in that many calls: by ring or tree, whichever is sooner."""
    if group.ranks == 1:
        return 0.0
    ring = ring_all_reduce_seconds(cluster, group, whole_bytes / calls)
    if group.nodes(cluster) > 1:
        ring = min(ring, tree_all_reduce_seconds(cluster, group, whole_bytes / calls))
    return calls * ring


def ring_all_reduce_seconds(cluster: Cluster, group: Group, message_bytes: float) -> float:
    """One all-reduce as a reduce-scatter and an all-gather around the same ring."""
    share = 2 * (group.ranks - 1) / group.ranks
    bandwidth = share * message_bytes / group.bus_bytes_per_second(cluster)
    plateau = RING_PLATEAU if group.nodes(cluster) > 1 else 1.0
    return bandwidth + calibration.CALL_SECONDS + 2 * plateau * _ring_seconds(cluster, group)


def tree_all_reduce_seconds(cluster: Cluster, group: Group, message_bytes: float) -> float:
    """One all-reduce up a tree of nodes and down again, chunk by chunk.

    Two trees carry half the message each, so that every port sends it once up and once down
    (NVIDIA 2019, "Massively Scale Your Deep Learning Training with NCCL 2.4"). NCCL's correction of
    a tree's bandwidth at medium sizes (treeCorrectionFactor) is left out: with it two halves would
    cost more than the whole and a start, and no published row here comes out nearer.
    """
    near, nodes = group.per_node(cluster), group.nodes(cluster)
    bus = group.bus_bytes_per_second(cluster) * TREE_SHARE
    bandwidth = 2 * message_bytes / bus
    chunk = tree_chunk_bytes(cluster, message_bytes)
    port = cluster.port_bytes_per_second * cluster.network_share * calibration.BESIDE_TRAINING
    inside = hop_seconds(cluster) + chunk / BLOCK_BYTES_PER_SECOND
    far = NETWORK_HOP_SECONDS + chunk / BLOCK_BYTES_PER_SECOND
    far += chunk / min(port, group.network_bytes_per_second(cluster))
    levels = math.ceil(math.log2(nodes))
    return bandwidth + calibration.CALL_SECONDS + 2 * ((near - 1) * inside + levels * far)


def tree_chunk_bytes(cluster: Cluster, message_bytes: float) -> float:
    """What a tree passes on at a time: the largest chunk, or a small share of a small message.

    NCCL halves the chunk, down to 32 KiB, as long as a channel has few of them (src/enqueue.cc,
    calcCollChunking), with `CHANNELS_A_PORT` channels a port.
    """
    share = message_bytes / (CHANNELS_A_PORT * cluster.ports * CHUNKS_A_CHANNEL)
    return min(TREE_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, share), message_bytes)


def broadcast_seconds(
    cluster: Cluster, group: Group, whole_bytes: float, calls: float = 1
) -> float:
    """Broadcasts of `whole_bytes` together, one after another, in that many calls.

    A ring passes chunks from rank to rank; each broadcast waits until its first chunk has been
    through all of them, at the latency of a tree's hop (NCCL, src/graph/tuning.cc: nsteps * hwLat
    of Tree/Simple for ncclFuncBroadcast).
    """
    if group.ranks == 1:
        return 0.0
    fill = calibration.CALL_SECONDS + group.ranks * CHUNK_HOP_SECONDS
    return whole_bytes / group.bus_bytes_per_second(cluster) + calls * fill


def all_to_all_seconds(cluster: Cluster, group: Group, sent_bytes: float) -> float:
    """Each rank sends an equal part of `sent_bytes` to every rank: over its own link and port."""
    if group.ranks == 1:
        return 0.0
    near = group.per_node(cluster)
    inside = (near - 1) / group.ranks * sent_bytes / bandwidth_in_training(cluster.device.peer_link)
    outside = (group.ranks - near) / group.ranks * sent_bytes / _own_port(cluster)
    starts = NETWORK_HOP_SECONDS * (group.nodes(cluster) > 1)
    return inside + outside + starts


def send_seconds(cluster: Cluster, crosses_nodes: bool, sent_bytes: float) -> float:
    """One rank sends to another, of its own node or of another one."""
    if not crosses_nodes:
        return sent_bytes / bandwidth_in_training(cluster.device.peer_link) + hop_seconds(cluster)
    return sent_bytes / _own_port(cluster) + NETWORK_HOP_SECONDS


def hop_seconds(cluster: Cluster) -> float:
    """Latency from one device of a node to the next."""
    return NVLINK_HOP_SECONDS if cluster.device.gpu_link else PCIE_HOP_SECONDS


@lru_cache(maxsize=10_000)
def hops_across_nodes(gpus_per_node: int, stride: int, stages: int) -> tuple[bool, ...]:
    """Whether each hop of a pipeline leaves a node: stage to stage, then from last to first.

    Stages lie `stride` ranks apart. A hop leaves its node where it does for any rank of the stage:
    with 16 stages of 4 ranks on nodes of 8 every second one does.
    """
    starts = [stage * stride for stage in range(stages)]
    ends = [*starts[1:], 0]
    return tuple(
        any(
            (start + rank) // gpus_per_node != (end + rank) // gpus_per_node
            for rank in range(min(stride, gpus_per_node))
        )
        for start, end in zip(starts, ends, strict=True)
    )


def _own_port(cluster: Cluster) -> float:
    """What one device sends to other nodes where all of its node do: its share of the ports."""
    share = cluster.network_bytes_per_second_per_gpu * cluster.network_share
    link = cluster.device.peer_link.sustained_bytes_per_second
    return min(share, link) * calibration.BESIDE_TRAINING


def _ring_seconds(cluster: Cluster, group: Group) -> float:
    """Latency of a pass around a ring: its hops."""
    across = group.nodes(cluster) - 1
    inside = group.ranks - 1 - across
    return inside * hop_seconds(cluster) + across * NETWORK_HOP_SECONDS
