"""Seconds of single kernels: matrix products by shape, everything else by the bytes it moves.

A product of shape (m, k) x (k, n) is cut into tiles of the output, one for each multiprocessor at
a time: where tiles or waves of them come out uneven, units idle (NVIDIA, Matrix Multiplication
Background User's Guide, sections on tile and wave quantization). Tensor cores want every inner
dimension in multiples of 16 bytes (the same guide, section 3.1); other shapes are computed on the
vector units, at the float32 rate.
"""

from __future__ import annotations

import math
from functools import lru_cache

from utils.catalog import Device
from utils.planner import calibration

# (rows, columns) of an output tile, and its rate beside the largest: a smaller tile reads its
# inputs more often (same guide, figure on tile sizes).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (9, 0): 132, (9, 4): 304, (10, 0): 148,
                   (10, 3): 148}  # fmt: skip
MEASURED_CEILING = 0.8  # of peak, where nobody measured the device's ceiling: A100 0.87, H100 0.80
ALIGNMENT = 8  # elements of 2 bytes


def ceiling_flops_per_second(gpu: Device, precision: str = "bf16") -> float:
    """The fastest matrix product that was measured on the device, in 16 bits or in fp8."""
    if precision != "bf16":
        measured = gpu.fp8_ceiling_tflops
        return measured * 1e12 if measured else MEASURED_CEILING * gpu.peak_flops_per_second("fp8")
    if gpu.matmul_ceiling_tflops is not None:
        return gpu.matmul_ceiling_tflops * 1e12
    return MEASURED_CEILING * gpu.peak_flops_per_second("bf16" if gpu.bf16_native else "fp16")


def sustained_share(gpu: Device) -> float:
    """Share of that ceiling that a model's products sustain, by generation."""
    hopper_on = gpu.capability >= (9, 0)
    return calibration.HOPPER_SUSTAINED if hopper_on else calibration.AMPERE_SUSTAINED


@lru_cache(maxsize=100_000)
def shape_efficiency(m: float, n: float, multiprocessors: int, batch: int = 1) -> float:
    """Share of the ceiling that a product with an (m, n) output reaches, by tiles and waves."""
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        slots = math.ceil(tiles / multiprocessors) * multiprocessors
        best = max(best, rate * batch * m * n / (slots * rows * columns))
    return best


def matmul_seconds(
    gpu: Device, m: float, n: float, k: float, batch: int = 1, precision: str = "bf16"
) -> float:
    """Seconds of `batch` products (m, k) x (k, n) in 16 bits or fp8, with results in 16 bits."""
    flops = 2.0 * batch * m * n * k
    written = 2.0 * batch * m * n
    width = 2.0 if precision == "bf16" else 1.0
    moved = width * batch * (m * k + k * n) + written
    if any(int(d) % ALIGNMENT for d in (n, k)):
        vector_rate = gpu.fp32_tflops * 1e12 * sustained_share(gpu)
        return max(flops / vector_rate, memory_seconds(gpu, moved))
    processors = MULTIPROCESSORS.get(gpu.capability, 108)
    rate = ceiling_flops_per_second(gpu, precision) * sustained_share(gpu)
    rate *= shape_efficiency(m, n, processors, batch)
    return max(flops / rate + memory_seconds(gpu, written), memory_seconds(gpu, moved))


def memory_seconds(gpu: Device, moved_bytes: float) -> float:
    """Seconds of kernels that read and write that many bytes of device memory in all."""
    return moved_bytes / (gpu.memory_bytes_per_second * calibration.MEMORY_SUSTAINED)
