"""The torchrun command line: one process a GPU, on all nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from utils.planner.cluster import Cluster

PORT = 29500


def torchrun(cluster: Cluster, script: str, arguments: Sequence[str] = ()) -> str:
    """The command that every node runs; several nodes meet at HEAD_NODE, the first one's address.

    Ranks are numbered node by node, so that the axis that varies fastest stays inside a node.
    """
    if cluster.nodes == 1:
        meeting = "--standalone"
    else:
        meeting = f'--rdzv-backend=c10d --rdzv-id=0 --rdzv-endpoint="$HEAD_NODE:{PORT}"'
    size = f"--nnodes={cluster.nodes} --nproc-per-node={cluster.gpus_per_node}"
    return " ".join(["torchrun", size, meeting, script, *map(shlex.quote, arguments)])


def torchrun_notes(cluster: Cluster, script: str) -> list[str]:
    """What the reader must set or know before the command works."""
    notes = []
    if cluster.nodes > 1:
        notes.append("Run it on every node, with HEAD_NODE set to the first one's host name.")
    if script == "train.py":
        notes.append("Start it in this folder: train.py imports the modules that lie beside it.")
    else:
        notes.append(
            "There is no train.py for this plan, so the command starts Megatron-LM's own script; "
            "run it in a checkout of Megatron-LM."
        )
    return notes
