"""How a simulated device allocates, and which kernels it would choose."""

from __future__ import annotations

from dataclasses import dataclass

from utils.memory.source import CUDA_BLOCK_BYTES


@dataclass(frozen=True)
class SimulatedDevice:
    """A device as the simulator sees it."""

    name: str
    memory_bytes: int | None
    granularity_bytes: int
    is_cuda: bool
    flash: bool


def simulated_device(name: str) -> SimulatedDevice:
    if name == "cpu":
        return SimulatedDevice("simulated CPU", None, 1, False, False)
    return SimulatedDevice(f"simulated {name}", None, CUDA_BLOCK_BYTES, True, True)
