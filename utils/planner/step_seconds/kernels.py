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
from utils.catalog.device_facts import NVIDIA
from utils.planner import calibration

# (rows, columns) of an output tile, and its rate beside the largest: a smaller tile reads its
# inputs more often (same guide, figure on tile sizes).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
MEASURED_CEILING = 0.8  # of peak, where nobody measured the device's ceiling: A100 0.87, H100 0.80
MEAN_SUSTAINED = (
    calibration.AMPERE_SUSTAINED + calibration.HOPPER_SUSTAINED + calibration.BLACKWELL_SUSTAINED
) / 3  # for other makers' devices
# By the generation whose matrix instructions a device has: its capability's first number, but for
# cards of Blackwell's time (12), which have neither Hopper's instructions nor a data center's power
# limit, and which no run was compared for: they are taken for faster cards of the generation before.
GENERATION_SHARES = {
    7: calibration.AMPERE_SUSTAINED,
    8: calibration.AMPERE_SUSTAINED,
    9: calibration.HOPPER_SUSTAINED,
    10: calibration.BLACKWELL_SUSTAINED,
}
INSTRUCTIONS_OF = {12: 8}
ALIGNMENT = 8  # elements of 2 bytes
# The power limits of A100, H100 and B200, whose rows set the shares that products sustain. Blackwell
# Ultra (10.3) is compared with B200.
LIMIT_WATTS = {(8, 0): 400, (9, 0): 700, (10, 0): 1000, (10, 3): 1000}

# Flash attention by generation: the compute capability for whose matrix instructions it is written,
# and the share of that device's peak it reaches over forward and backward on long sequences. 1: 25
# to 40% of an A100 (Dao 2023, arXiv:2307.08691, abstract); 2: up to 0.61 of an A100 (its figure 4,
# causal); 3: 616 forward and about 500 backward TFLOP/s of an H100 (Shah et al. 2024,
# arXiv:2407.08608, figures 5 and 6, causal); 4: half forward and 0.42 backward of a B200
# (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json, sdp_fwd and sdp_bwd at 131,072).
FLASH = {1: (8, 0.32), 2: (8, 0.61), 3: (9, 0.54), 4: (10, 0.44)}
# What older instructions reach of a newer device's peak: 62% of an H100 (Luo et al. 2024,
# arXiv:2402.13499, section on tensor cores: mma against wgmma).
OLDER_INSTRUCTIONS = 0.62
# Sequence at which causal attention runs at half that rate: of FlashAttention-2's 335 TFLOP/s on an
# H100 it reaches 191 at 512, 260 at 1,024, 298 at 2,048 (Shah et al. 2024, figure 5).
FLASH_HALF_SEQUENCE = 300
# Flash attention of another maker, beside the fastest product measured on its device: as generation 2
# on an A100, whose ceiling is 0.87 of its peak. Not compared with any run.
FLASH_OTHER_MAKER = FLASH[2][1] / 0.87


def ceiling_flops_per_second(gpu: Device, precision: str = "bf16") -> float:
    """The fastest matrix product that was measured on the device, in 16 bits or in fp8."""
    if precision != "bf16":
        measured = gpu.fp8_ceiling_tflops
        return measured * 1e12 if measured else MEASURED_CEILING * gpu.peak_flops_per_second("fp8")
    if gpu.matmul_ceiling_tflops is not None:
        return gpu.matmul_ceiling_tflops * 1e12
    return MEASURED_CEILING * gpu.peak_flops_per_second("bf16" if gpu.bf16_native else "fp16")


def instruction_generation(gpu: Device) -> int:
    """Of an NVIDIA device's matrix instructions: 7, 8, 9 or 10, a key of `GENERATION_SHARES`.

    Raises:
        ValueError: its capability is none that the tables here know.
    """
    major = gpu.capability[0]
    found = INSTRUCTIONS_OF.get(major, major)
    if found not in GENERATION_SHARES:
        raise ValueError(
            f"{gpu.name} has compute capability {major}.{gpu.capability[1]}, and no speed was set "
            f"for it: give it a row of GENERATION_SHARES or INSTRUCTIONS_OF in {__name__}."
        )
    return found


def sustained_share(gpu: Device, precision: str = "bf16") -> float:
    """Share of that ceiling that a model's products sustain: by generation, type and power limit.

    Power rises with frequency times voltage squared, and voltage with frequency: a limit allows
    clocks as its cube root. Beside the limit of the device whose rows set the share, and only for
    the same generation; ceilings are of short runs. A maker of whom no run was published here gets
    the mean of those of whom there are: it was compared with nothing.
    """
    share = (
        MEAN_SUSTAINED if gpu.vendor != NVIDIA else GENERATION_SHARES[instruction_generation(gpu)]
    )
    if gpu.vendor == NVIDIA and gpu.board_watts and gpu.capability in LIMIT_WATTS:
        share *= (gpu.board_watts / LIMIT_WATTS[gpu.capability]) ** (1 / 3)
    return share * (1.0 if precision == "bf16" else calibration.FP8_SUSTAINED)


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
        vector_rate = gpu.fp32_tflops * 1e12 * calibration.VECTOR_SUSTAINED
        return max(flops / vector_rate, memory_seconds(gpu, moved))
    rate = ceiling_flops_per_second(gpu, precision) * sustained_share(gpu, precision)
    rate *= shape_efficiency(m, n, gpu.multiprocessors, batch)
    return max(flops / rate + memory_seconds(gpu, written), memory_seconds(gpu, moved))


def flash_flops_per_second(gpu: Device, generation: int | None, sequence_length: float) -> float:
    """Rate of flash attention, of the products that a causal mask leaves.

    Args:
        gpu: The device.
        generation: Of the kernel, see `FLASH`; None for the newest that the device runs.
        sequence_length: s.
    """
    if gpu.vendor != NVIDIA:
        rate = FLASH_OTHER_MAKER * ceiling_flops_per_second(gpu)
        return rate / (1 + FLASH_HALF_SEQUENCE / sequence_length)
    major = instruction_generation(gpu)
    newest = max((g for g, (native, _) in FLASH.items() if native <= major), default=1)
    native, share = FLASH[min(generation or newest, newest)]
    peak = gpu.peak_flops_per_second("bf16" if gpu.bf16_native else "fp16")
    instructions = OLDER_INSTRUCTIONS if native < major else 1.0
    return share * instructions * peak / (1 + FLASH_HALF_SEQUENCE / sequence_length)


def memory_seconds(gpu: Device, moved_bytes: float) -> float:
    """Seconds of kernels that read and write that many bytes of device memory in all."""
    return moved_bytes / (gpu.memory_bytes_per_second * calibration.MEMORY_SUSTAINED)
