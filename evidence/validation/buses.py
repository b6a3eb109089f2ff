"""Bus bandwidths of all-reduces alone, by size: what the collectives' formulas say of them.

No constant was set on these rows. Nothing else runs beside them, so that `BESIDE_TRAINING` is left
out, and H200's and B200's all-reduces in a node are not here: switches add up their parts.
"""

from __future__ import annotations

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.catalog import SUSTAINED
from utils.planner import Cluster, calibration
from utils.planner.step_seconds.collectives import Group, all_reduce_seconds
from utils.units import GB

SETUPS = {
    "A100": Cluster(gpu="A100-80GB", nodes=1),
    "HDR": Cluster(gpu="A100-40GB", nodes=3, network_bytes_per_second=4 * 25 * GB, network_ports=4),
    "B200": Cluster(gpu="B200", nodes=4, network_bytes_per_second=8 * 50 * GB),
}


def comparisons() -> list[Comparison]:
    """GB/s: 2 (n - 1)/n times the size, over the seconds."""
    return [
        Comparison(
            "All-reduces alone",
            "bus GB/s",
            f"{row['setup']} {whole(row['bytes']):,} B",
            float(row["bus_gb_s"]),
            bus_bandwidth(SETUPS[row["setup"]], whole(row["bytes"])),
            1.0,
        )
        for row in table("bus_bandwidth")
    ]


def bus_bandwidth(cluster: Cluster, size: int) -> float:
    """GB/s of an all-reduce over the whole cluster, with nothing beside it."""
    group = Group(cluster.gpus)
    share = 2 * (group.ranks - 1) / group.ranks
    seconds = all_reduce_seconds(cluster, group, size)
    return share * size / (seconds - _beside(cluster, group, size)) / GB


def _beside(cluster: Cluster, group: Group, size: int) -> float:
    """Seconds that the bytes take longer inside training than alone."""
    link = cluster.device.peer_link.sustained_bytes_per_second
    fair = group.per_node(cluster) * cluster.network_bytes_per_second_per_gpu
    network = fair * SUSTAINED[cluster.network].share
    bus = link if cluster.nodes == 1 else min(link, network)
    share = 2 * (group.ranks - 1) / group.ranks
    return share * size / bus * (1 / calibration.BESIDE_TRAINING - 1)
