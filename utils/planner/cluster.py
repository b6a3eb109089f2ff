"""The machines: devices, nodes, links, and what an hour of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from utils.catalog import Device, Link, device, link
from utils.catalog.rules import keep_whole, of_kind, positive, whole
from utils.units import GB


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of alike devices behind one network.

    Attributes:
        gpu: The device, by its name in the catalog or as a row of your own.
        nodes: Machines.
        gpus_per_node: Devices in one machine.
        network_bytes_per_second: What one machine sends to others, all its ports together, in one
            direction. 8 ports of 200 Gb/s are 200e9.
        usd_per_gpu_hour: Price of one device for one hour; None where it is not asked for.
    """

    gpu: Device | str
    nodes: int
    gpus_per_node: int = 8
    network_bytes_per_second: float = 8 * 25 * GB
    usd_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown device, an empty cluster or a negative price."""
        of_kind("cluster", gpu=(self.gpu, Device, str))
        if isinstance(self.gpu, str):
            device(self.gpu)
        keep_whole(self, "cluster", "nodes", "gpus_per_node")
        positive("cluster", network_bytes_per_second=self.network_bytes_per_second)
        if self.usd_per_gpu_hour is not None:
            positive("cluster", least=0, usd_per_gpu_hour=self.usd_per_gpu_hour)

    @property
    def device(self) -> Device:
        """The device's row."""
        return _row(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.nodes * self.gpus_per_node

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
