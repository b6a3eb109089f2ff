"""The node's own memory: what offload puts there, whether it has room, and the way there."""

from __future__ import annotations

from utils.catalog import ModelShape
from utils.planner.activations import stage_block_bytes
from utils.planner.cluster import Cluster
from utils.planner.collectives import in_training
from utils.planner.layout import Batch, Plan
from utils.planner.memory import in_flight_blocks, on_device
from utils.planner.stages import Stage, distinct, stages
from utils.planner.states import host_bytes
from utils.units import format_bytes


def node_host_bytes(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> float:
    """Bytes that offload puts into the memory of the node that holds most: states, activations."""
    if plan.offload == "none" and not plan.offload_activations:
        return 0.0
    places = distinct(stages(model, plan))
    rank = max(
        host_bytes(model, plan, stage) + _activations(model, plan, batch, stage) for stage in places
    )
    return cluster.gpus_per_node * rank


def check_host(model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch) -> None:
    """The nodes have room for what offload puts there. Raises ValueError with what would have."""
    needed = node_host_bytes(model, cluster, plan, batch)
    if needed > cluster.host_bytes_per_node:
        raise ValueError(
            f"Offload puts {format_bytes(needed)} into the memory of each node, which has "
            f"{format_bytes(cluster.host_bytes_per_node)}. Nearest: nodes of "
            f"{format_bytes(needed)}, {_more_nodes(needed, cluster)} nodes with states sharded "
            "over all of them, or no offload."
        )


def activation_seconds(
    model: ModelShape, cluster: Cluster, plan: Plan, batch: Batch, stage: Stage
) -> float:
    """Seconds to send one micro-batch's activations of a stage to the host, one direction."""
    if not plan.offload_activations:
        return 0.0
    some = stage.layers if plan.offload_layers is None else plan.offload_layers
    size = min(some, stage.layers) * stage_block_bytes(
        model, plan, batch.sequence_length, stage, plan.recompute
    )
    return size / in_training(cluster.device.pcie)


def _activations(model: ModelShape, plan: Plan, batch: Batch, stage: Stage) -> float:
    if not plan.offload_activations:
        return 0.0
    one = stage_block_bytes(model, plan, batch.sequence_length, stage, plan.recompute)
    blocks = in_flight_blocks(plan, batch, stage)
    return (blocks - on_device(plan, stage, blocks)) * one


def _more_nodes(needed: float, cluster: Cluster) -> int:
    return -int(-(needed * cluster.nodes) // cluster.host_bytes_per_node)
