"""The torchrun command line: one process a GPU, on all nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from utils.planner.cluster import Cluster

PORT = 29500
LOCALHOST = "127.0.0.1"
# Where no endpoint is named, torchrun meets in a file that only its user may read; `--standalone` opens a port
# on every address, and runs what it is sent there.
ALONE = f"--rdzv-backend=c10d --rdzv-conf=store_type=file --local-addr={LOCALHOST}"
# Rank 0 opens the ranks' store, as train.py has it, and not torchrun, everywhere.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def torchrun(cluster: Cluster, script: str, arguments: Sequence[str] = ()) -> str:
    """The command that every node runs; several nodes meet at HEAD_NODE, the first one's address.

    Ranks are numbered node by node, so that the axis that varies fastest stays inside a node. On one
    node nothing is opened to other machines by torchrun, nor by train.py.
    """
    if cluster.nodes == 1:
        meeting = ALONE
    else:
        meeting = f'--rdzv-backend=c10d --rdzv-id=0 --rdzv-endpoint="$HEAD_NODE:{PORT}"'
    size = f"--nnodes={cluster.nodes} --nproc-per-node={cluster.gpus_per_node}"
    own = [OWN_STORE] if cluster.nodes == 1 and script == "train.py" else []
    return " ".join([*own, "torchrun", size, meeting, script, *map(shlex.quote, arguments)])


def torchrun_notes(cluster: Cluster, script: str) -> list[str]:
    """What the reader must set or know before the command works."""
    notes = []
    if cluster.nodes > 1:
        notes.append("Run it on every node, with HEAD_NODE set to the first one's host name.")
        notes.append(
            "Torchrun's meeting point, the ranks' store and their connections listen on every address, ask "
            "nobody who they are, and torchrun runs what it is sent: the nodes' network must be closed to all others."
        )
    elif script == "train.py":
        notes.append(
            "All that it opens is on the loopback address. Other users of this machine reach that: PyTorch's "
            "store asks nobody who they are."
        )
    else:
        notes.append(
            "Megatron-LM's ranks open PyTorch's store on every address, and it asks nobody who they are: the "
            "machine's network must be closed to all others."
        )
    if script == "train.py":
        notes.append("Start it in this folder: train.py imports the modules that lie beside it.")
    else:
        notes.append(
            "There is no train.py for this plan, so the command starts Megatron-LM's own script; "
            "run it in a checkout of Megatron-LM."
        )
    return notes
