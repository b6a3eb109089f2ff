"""The node's own memory: what offload puts there, whether it has room, and the way there."""

from __future__ import annotations

from utils.planner.cluster import Cluster
from utils.planner.collectives import in_training
from utils.planner.moments import device_blocks, in_flight_blocks
from utils.planner.setup import ClusterSetup, Setup
from utils.planner.stages import Stage
from utils.planner.states import host_bytes
from utils.units import format_bytes


def node_host_bytes(setup: ClusterSetup) -> float:
    """Bytes that offload puts into the memory of the node that holds most: states, activations."""
    if setup.plan.offload == "none" and not setup.plan.offload_activations:
        return 0.0
    rank = max(host_bytes(setup, stage) + _activations(setup, stage) for stage in setup.kinds)
    return setup.cluster.gpus_per_node * rank


def check_host(setup: ClusterSetup) -> None:
    """The nodes have room for what offload puts there. Raises ValueError with what would have."""
    needed, cluster = node_host_bytes(setup), setup.cluster
    if needed > cluster.host_bytes_per_node:
        raise ValueError(
            f"Offload puts {format_bytes(needed)} into the memory of each node, which has "
            f"{format_bytes(cluster.host_bytes_per_node)}. Nearest: nodes of "
            f"{format_bytes(needed)}, {_more_nodes(needed, cluster)} nodes with states sharded "
            "over all of them, or no offload."
        )


def activation_seconds(setup: ClusterSetup, stage: Stage) -> float:
    """Seconds to send one micro-batch's activations of a stage to the host, one direction."""
    plan = setup.plan
    if not plan.offload_activations:
        return 0.0
    some = stage.layers if plan.offload_layers is None else plan.offload_layers
    size = min(some, stage.layers) * setup.activations.kept[stage.kind]
    return size / in_training(setup.gpu.pcie)


def _activations(setup: Setup, stage: Stage) -> float:
    if not setup.plan.offload_activations:
        return 0.0
    away = in_flight_blocks(setup, stage) - device_blocks(setup, stage)
    return away * setup.activations.kept[stage.kind]


def _more_nodes(needed: float, cluster: Cluster) -> int:
    return -int(-(needed * cluster.nodes) // cluster.host_bytes_per_node)
