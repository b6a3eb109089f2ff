"""Links between devices: bytes per second in ONE direction.

Data sheets print the sum of both directions: an A100's "600 GB/s" NVLink is 300 GB/s a direction,
and a collective is bound by the one direction. These are line rates; what NCCL reaches of them is in
`SUSTAINED`, by kind of link.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog.lookup import find
from utils.rules import above_zero, one_of
from utils.units import GB


@dataclass(frozen=True)
class Sustained:
    """What collectives reach of a kind of link.

    Attributes:
        share: Of the line rate, by large messages.
        source: Where it was published.
    """

    share: float
    source: str


_TOPO = "NCCL, src/graph/topo.h"
SUSTAINED: dict[str, Sustained] = {
    "NVLink 2": Sustained(20.0 / 25, f"{_TOPO}, SM70_NVLINK_BW: 20.0 GB/s of a link of 25"),
    "NVLink 3": Sustained(20.0 / 25, f"{_TOPO}, SM80_NVLINK_BW: 20.0 of 25; nccl-tests on 8 A100 "
                          "ends at 234.9 of 300 (stas00/ml-engineering, network/README.md)"),
    "NVLink 4": Sustained(20.6 / 25, f"{_TOPO}, SM90_NVLINK_BW: 20.6 of 25; 370 of 450 for a ring "
                          "(NVIDIA/nccl-tests issue 212)"),
    "NVLink 5": Sustained(40.1 / 50, f"{_TOPO}, SM100_NVLINK_BW: 40.1 of 50"),
    "Infinity Fabric": Sustained(313 / 448, "stas00/ml-engineering, network/README.md: 312.9 of "
                                 "448 GB/s, all-reduce of 4 GB over 8 MI300X"),
    "PCIe": Sustained(12.0 / 15.75, f"{_TOPO}, PCI_BW: 12.0 of 15.75 GB/s, PCIe 3 x16"),
    "InfiniBand": Sustained(0.96, "NVIDIA/nccl-tests issue 119: 24 of 25 GB/s a port of HDR is what "
                            "its authors expect, 96 of 100 measured; issue 290: 46-48 of 50, NDR"),
    "RoCE": Sustained(0.75, "NVIDIA/nccl issue 495: 600 of 800 Gb/s, two nodes of 8 A100"),
    "EFA": Sustained(0.85, "stas00/ml-engineering, network/README.md: 340 of 400 Gb/s, EFA v1"),
    "Omni-Path": Sustained(0.34, "stas00/ml-engineering, network/README.md: 135 of the 400 Gb/s of "
                           "a node of Jean Zay"),
    "TCP": Sustained(0.6, "among NVIDIA/nccl issue 209, of 4 GB/s by rings: 0.36 to 0.49 with 2.4.2, "
                     "0.52 to 0.94 with 2.3.7; and issue 450: 4 to 6 of 12.5 GB/s"),
    "other": Sustained(0.8, "stas00/ml-engineering, network/README.md: about 80% in the best case"),
}  # fmt: skip


@dataclass(frozen=True)
class Link:
    """A link between two devices or two nodes.

    Attributes:
        name: What `link` finds it by.
        link_bytes_per_second: Per direction; of all lanes and sub-links of one GPU or one port.
        source: Where the figure was read.
        kind: Which row of `SUSTAINED` says what collectives reach of it.
    """

    name: str
    link_bytes_per_second: float
    source: str
    kind: str = "other"

    @property
    def sustained_bytes_per_second(self) -> float:
        """What collectives with large messages reach, per direction."""
        return SUSTAINED[self.kind].share * self.link_bytes_per_second

    def __post_init__(self) -> None:
        """Raises ValueError where nothing passes, or everything at once, or for an unknown kind."""
        one_of(f"link {self.name}: kind", self.kind, tuple(SUSTAINED))
        above_zero(f"link {self.name}", link_bytes_per_second=self.link_bytes_per_second)


def _pcie_x16(gigatransfers_per_second: float) -> float:
    """16 lanes, one bit a transfer, 128 of 130 bits are data (PCI Express base specification)."""
    return 16 * gigatransfers_per_second * GB * 128 / 130 / 8


def _gigabits(gigabits_per_second: float) -> float:
    return gigabits_per_second * GB / 8


_NVLINK = "stas00/ml-engineering, network/README.md, NVLink table (unidirectional column)"
_PCIE = "PCI Express base specification: 16 lanes, 128b/130b encoding"
_INFINIBAND = "NVIDIA DGX SuperPOD cabling guide, NDR overview: 4 lanes of 50 (HDR), 100 (NDR) Gb/s"
_XDR = "InfiniBand Trade Association, XDR specification release: 4 lanes of 200 Gb/s"
_XGMI = (
    "stas00/ml-engineering, network/README.md, AMD table: MI300X, 7 links of 64 GB/s, all in use"
)
_C2C = "stas00/ml-engineering, network/README.md, NVLink-C2C: 450 GB/s a direction, second-hand"
_ETHERNET = "IEEE 802.3: Gb/s of one port"

NVLINK_2 = Link("NVLink 2", 150 * GB, f"{_NVLINK}: V100, 6 links of 25 GB/s", "NVLink 2")
NVLINK_3 = Link("NVLink 3", 300 * GB, f"{_NVLINK}: A100, 12 links of 25 GB/s", "NVLink 3")
NVLINK_4 = Link("NVLink 4", 450 * GB, f"{_NVLINK}: H100 and H200, 18 links of 25 GB/s", "NVLink 4")
NVLINK_5 = Link("NVLink 5", 900 * GB, f"{_NVLINK}: B200, 18 links of 50 GB/s", "NVLink 5")
NVLINK_C2C = Link("NVLink-C2C", 450 * GB, _C2C)
INFINITY_FABRIC_3 = Link("Infinity Fabric 3", 448 * GB, _XGMI, "Infinity Fabric")
PCIE_3_X16 = Link("PCIe 3 x16", _pcie_x16(8), f"{_PCIE}, 8 GT/s", "PCIe")
PCIE_4_X16 = Link("PCIe 4 x16", _pcie_x16(16), f"{_PCIE}, 16 GT/s", "PCIe")
PCIE_5_X16 = Link("PCIe 5 x16", _pcie_x16(32), f"{_PCIE}, 32 GT/s", "PCIe")

_NETWORK = [
    Link("InfiniBand HDR", _gigabits(200), _INFINIBAND, "InfiniBand"),
    Link("InfiniBand NDR", _gigabits(400), _INFINIBAND, "InfiniBand"),
    Link("InfiniBand XDR", _gigabits(800), _XDR, "InfiniBand"),
    Link(
        "Omni-Path 100",
        _gigabits(100),
        "BigScience train/tr11-176B-ml/chronicles-prequel.md: 4 x 100 Gb/s a node",
        "Omni-Path",
    ),
    Link("Ethernet 10G", _gigabits(10), _ETHERNET, "TCP"),
    Link("Ethernet 25G", _gigabits(25), _ETHERNET, "TCP"),
    Link("Ethernet 100G", _gigabits(100), _ETHERNET, "RoCE"),
    Link("Ethernet 400G", _gigabits(400), _ETHERNET, "RoCE"),
]
_INSIDE_A_NODE = [
    NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5, NVLINK_C2C, INFINITY_FABRIC_3, PCIE_3_X16, PCIE_4_X16,
    PCIE_5_X16,
]  # fmt: skip

LINKS: dict[str, Link] = {row.name: row for row in _INSIDE_A_NODE + _NETWORK}


def link(name: str) -> Link:
    """The link called `name`, in any case and spacing: `link("nvlink3")`.

    Raises:
        ValueError: no such link; the sentence gives the nearest names.
    """
    return find(LINKS, name, "link")
