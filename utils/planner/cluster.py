"""The machines: devices, nodes, links, and what an hour of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from utils.catalog import SUSTAINED, Device, Link, device, link
from utils.catalog.prices import KINDS
from utils.rules import above_zero, keep_whole, of_kind, one_of, positive, whole
from utils.units import GB, GIB

HOST_BYTES_PER_GPU = 225 * GIB  # see `Cluster.host_memory_bytes`
PLAIN_PORT = 12.5 * GB  # the least that a port of a network for training carries: 100 Gb/s


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
        network_ports: How many ports that is. A GPU sends through one of them, and some frameworks
            let a whole node send through one. None: as many as ports of 100 Gb/s would be, one at
            least and one for each device at most, so that 200e9 are 8 ports of 200 Gb/s and 12.5e9
            is one of 100.
        network_kind: "InfiniBand", "RoCE", "EFA", "Omni-Path", "TCP" or "other", see
            `utils.catalog.SUSTAINED`. None: InfiniBand, and TCP below 100 Gb/s a node.
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
    network_ports: int | None = None
    network_kind: str | None = None
    usd_per_gpu_hour: float | None = None
    pricing: str = "on demand"
    interruptions_per_1000_node_days: float | None = None
    host_memory_bytes: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown device, an empty cluster or a price that is none."""
        of_kind("Cluster", gpu=(self.gpu, Device, str))
        if isinstance(self.gpu, str):
            device(self.gpu)
        keep_whole(self, "Cluster", "nodes", "gpus_per_node", optional="network_ports")
        self._check_network()
        one_of("pricing", self.pricing, KINDS)
        if self.host_memory_bytes is not None:
            positive("Cluster", host_memory_bytes=self.host_memory_bytes)
        self._check_price()

    def _check_network(self) -> None:
        """More ports than devices are refused: no rank here sends through two of them."""
        positive("Cluster", least=0, network_bytes_per_second=self.network_bytes_per_second)
        above_zero("Cluster", network_bytes_per_second=self.network_bytes_per_second)
        if self.network_kind is not None:
            one_of("network_kind", self.network_kind, tuple(SUSTAINED))
        ports = self.network_ports
        if ports is not None and ports > self.gpus_per_node:
            raise ValueError(
                f"cluster: network_ports is {ports}, with {self.gpus_per_node} GPUs a node. Each GPU "
                f"sends through one port: write {self.gpus_per_node} at most, and what all ports "
                "carry together as network_bytes_per_second."
            )

    def _check_price(self) -> None:
        usd, often = self.usd_per_gpu_hour, self.interruptions_per_1000_node_days
        if usd is not None:
            positive("Cluster", least=0, usd_per_gpu_hour=usd)
            if usd == 0:
                raise ValueError(
                    "cluster: usd_per_gpu_hour is 0; it must be above 0. Write what an hour of your "
                    "own machines costs, or None for the lowest price listed."
                )
        if often is not None:
            positive("Cluster", least=0, interruptions_per_1000_node_days=often)
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
    def ports(self) -> int:
        """Network ports of a node, see `network_ports`."""
        if self.network_ports is not None:
            return self.network_ports
        return min(self.gpus_per_node, max(1, int(self.network_bytes_per_second // PLAIN_PORT)))

    @property
    def port_bytes_per_second(self) -> float:
        """One network port, one direction."""
        return self.network_bytes_per_second / self.ports

    @property
    def network(self) -> str:
        """Kind of the network's links, see `network_kind`."""
        if self.network_kind is not None:
            return self.network_kind
        return "TCP" if self.network_bytes_per_second < PLAIN_PORT else "InfiniBand"

    @property
    def network_share(self) -> float:
        """What collectives reach of the network's line rate."""
        return SUSTAINED[self.network].share

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
