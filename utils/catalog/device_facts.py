"""What is known of one GPU model: memory, bandwidth, peak arithmetic, links, and their sources."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog.age import day_of
from utils.catalog.links import Link
from utils.rules import above_zero
from utils.units import MIB

NVIDIA = "NVIDIA"
CONTEXT_BYTES, HOPPER_CONTEXT_BYTES = 500 * MIB, 768 * MIB
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU model.

    Attributes:
        name: What `device` finds it by.
        memory_gb: The size printed on the box, for names and tables; not a byte count.
        memory_bytes: What CUDA reports as total memory, so what an allocator can hope for. It is
            below the chips' size (error correction and the driver take a part) and differs by up
            to 1% between drivers; the lowest of the usual figures is kept.
        memory_bytes_per_second: Peak bandwidth of the device's memory.
        capability: CUDA compute capability; AMD: of its gfx number, as ROCm's PyTorch gives it.
        multiprocessors: Streaming multiprocessors (AMD: compute units) that the card has switched on, by
            its maker's architecture paper.
        fp32_tflops, tf32_tflops, fp16_tflops, bf16_tflops, fp8_tflops: Peak of matrix products in
            that type, in 10**12 FLOP/s as data sheets print it; None without a unit for it.
        matmul_ceiling_tflops, fp8_ceiling_tflops: The fastest product that the source measured in
            bfloat16 and in fp8, in 10**12 FLOP/s; None where it measured none.
        gpu_link: The link to other GPUs of the node (NVLink, Infinity Fabric), None without one.
        host_link: The link to the host (PCIe; NVLink-C2C on Grace).
        vendor: Who makes it; figures of the planner that were set on NVIDIA's rows are no other's.
        board_watts: The most that the card may draw, by its data sheet; None where it was not read.
        memory_source, flops_source, ceiling_source, power_source: Where the figures were read.
        as_of: The day they were read.
    """

    name: str
    memory_gb: int
    memory_bytes: int
    memory_bytes_per_second: float
    capability: tuple[int, int]
    multiprocessors: int
    fp32_tflops: float
    fp16_tflops: float
    host_link: Link
    memory_source: str
    flops_source: str
    as_of: str
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    gpu_link: Link | None = None
    matmul_ceiling_tflops: float | None = None
    fp8_ceiling_tflops: float | None = None
    board_watts: float | None = None
    ceiling_source: str = ""
    power_source: str = ""
    vendor: str = NVIDIA

    def __post_init__(self) -> None:
        """Raises ValueError for figures that are not above zero, and for a day that is none."""
        day_of(self.as_of, f"device {self.name}")
        rates = {f"{key}_tflops": getattr(self, f"{key}_tflops") for key in DTYPES}
        above_zero(
            f"device {self.name}", memory_gb=self.memory_gb, memory_bytes=self.memory_bytes,
            memory_bytes_per_second=self.memory_bytes_per_second, board_watts=self.board_watts,
            multiprocessors=self.multiprocessors,
            matmul_ceiling_tflops=self.matmul_ceiling_tflops,
            fp8_ceiling_tflops=self.fp8_ceiling_tflops, **rates,
        )  # fmt: skip

    @property
    def bf16_native(self) -> bool:
        """Whether it computes bfloat16 itself (capability 8.0 on); older ones emulate it."""
        return self.capability >= (8, 0)

    @property
    def fp8_native(self) -> bool:
        """Whether it has units for fp8 products."""
        return self.fp8_tflops is not None

    @property
    def mxfp8_native(self) -> bool:
        """Whether its fp8 units take a scale for each block of 32: NVIDIA's Blackwell on."""
        return self.vendor == NVIDIA and self.fp8_native and self.capability >= (10, 0)

    @property
    def context_bytes(self) -> int:
        """What CUDA's context, loaded kernels and libraries take before the first tensor.

        With lazily loaded kernels (the default since CUDA 12) a few hundred MiB: 768 MiB on an H200
        (recorded on 2026-11-26, with PyTorch 2.11 for CUDA 13), less on GPUs with fewer processors.
        """
        return HOPPER_CONTEXT_BYTES if self.capability == (9, 0) else CONTEXT_BYTES

    @property
    def pcie(self) -> Link:
        """`host_link`, as labs of version 0.1 call it."""
        return self.host_link

    @property
    def peer_link(self) -> Link:
        """The fastest link to another GPU of the same node."""
        return self.gpu_link or self.host_link

    def peak_flops_per_second(self, dtype: str) -> float:
        """Peak dense FLOP/s in "fp32", "tf32", "fp16", "bf16" or "fp8".

        Raises:
            ValueError: no such type, or the device has no unit for it.
        """
        peaks = {key: getattr(self, f"{key}_tflops") for key in DTYPES}
        peak = peaks.get(dtype)
        if peak is None:
            known = ", ".join(key for key, value in peaks.items() if value)
            raise ValueError(f"{self.name} has no units for {dtype!r}; it has them for {known}.")
        return peak * 1e12
