"""The node's own memory: what offload puts there, and whether it has room."""

from __future__ import annotations

from collections.abc import Sequence

from utils.planner.cluster import Cluster
from utils.planner.stage_bytes.stage_memory import StageMemory
from utils.units import format_bytes


def node_host_bytes(cluster: Cluster, rows: Sequence[StageMemory]) -> float:
    """Bytes that offload puts into the memory of the node that holds most: states, activations."""
    return cluster.gpus_per_node * max(row.host_bytes for row in rows)


def check_host(cluster: Cluster, rows: Sequence[StageMemory]) -> None:
    """The nodes have room for what offload puts there. Raises ValueError with what would have."""
    needed = node_host_bytes(cluster, rows)
    if needed > cluster.host_bytes_per_node:
        more = -int(-(needed * cluster.nodes) // cluster.host_bytes_per_node)
        raise ValueError(
            f"Offload puts {format_bytes(needed)} into the memory of each node, which has "
            f"{format_bytes(cluster.host_bytes_per_node)}. Nearest: nodes of "
            f"{format_bytes(needed)}, {more} nodes with states sharded over all of them, or no "
            "offload."
        )
