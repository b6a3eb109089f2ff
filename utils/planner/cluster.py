"""The machines: devices, nodes, links, and what an hour of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from utils.catalog import Device, Link, device, link
from utils.catalog.prices import KINDS
from utils.catalog.rules import keep_whole, of_kind, one_of, positive, whole
from utils.units import GB, GIB

HOST_BYTES_PER_GPU = 225 * GIB  # see `Cluster.host_memory_bytes`


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of alike devices behind one network.

    Attributes:
        gpu: The device, by its name in the catalog or as a row of your own.
        nodes: Machines.
        gpus_per_node: Devices in one machine; in a rack whose devices share one fabric, such as the
            GB200 NVL72, those of the rack that the job has.
        network_bytes_per_second: What one machine sends to others, all its ports together, in one
            direction. 8 ports of 200 Gb/s are 200e9.
        usd_per_gpu_hour: Price of one device for one hour; None where it is not asked for.
        pricing: "on demand", "reserved" or "spot", whose nodes the provider takes back at times.
        interruptions_per_1000_node_days: How often; a spot price needs it.
        host_memory_bytes: Memory of one node's host; None for 225 GiB a device, what Lambda's nodes
            of 8 A100 have (1,800 GiB, skypilot-catalog lambda/vms.csv, commit 95eaf48).
    """

    gpu: Device | str
    nodes: int
    gpus_per_node: int = 8
    network_bytes_per_second: float = 8 * 25 * GB
    usd_per_gpu_hour: float | None = None
    pricing: str = "on demand"
    interruptions_per_1000_node_days: float | None = None
    host_memory_bytes: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown device, an empty cluster or a price that is none."""
        of_kind("cluster", gpu=(self.gpu, Device, str))
        if isinstance(self.gpu, str):
            device(self.gpu)
        keep_whole(self, "cluster", "nodes", "gpus_per_node")
        positive("cluster", network_bytes_per_second=self.network_bytes_per_second)
        one_of("pricing", self.pricing, KINDS)
        if self.host_memory_bytes is not None:
            positive("cluster", host_memory_bytes=self.host_memory_bytes)
        self._check_price()

    def _check_price(self) -> None:
        usd, often = self.usd_per_gpu_hour, self.interruptions_per_1000_node_days
        if usd is not None:
            positive("cluster", least=0, usd_per_gpu_hour=usd)
            if usd == 0:
                raise ValueError(
                    "cluster: usd_per_gpu_hour is 0; it must be above 0. Write what an hour of your "
                    "own machines costs, or None for the lowest price listed."
                )
        if often is not None:
            positive("cluster", least=0, interruptions_per_1000_node_days=often)
        if self.pricing == "spot" and often is None:
            price = "A spot price" if usd is None else f"A spot price of ${usd}"
            raise ValueError(
                f"cluster: {price} needs interruptions_per_1000_node_days, how often the provider "
                "takes nodes back. Write the rate that you saw, or pricing='on demand'."
            )

    @property
    def device(self) -> Device:
        """The device's row."""
        return _row(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.nodes * self.gpus_per_node

    @property
    def host_bytes_per_node(self) -> float:
        """Memory of one node's host."""
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        return self.gpus_per_node * HOST_BYTES_PER_GPU

    @property
    def node_link_bytes_per_second(self) -> float:
        """One device to its neighbours in the node, one direction."""
        return self.device.peer_link.link_bytes_per_second

    @property
    def network_bytes_per_second_per_gpu(self) -> float:
        """One device's share of the node's network ports, one direction."""
        return self.network_bytes_per_second / self.gpus_per_node


@lru_cache
def _row(name: str) -> Device:
    return device(name)


def network(name: str | Link, ports: int) -> float:
    """Bytes per second of `ports` network ports: `network("InfiniBand HDR", 8)`.

    Raises:
        ValueError: no such link, or no port.
    """
    whole("network", ports=ports)
    row = link(name) if isinstance(name, str) else name
    return ports * row.link_bytes_per_second
