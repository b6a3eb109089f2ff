"""GPUs: memory, bandwidth, peak arithmetic and links, every figure with its source.

Peaks are dense (data sheets often print twice that, "with sparsity") and, where a card tells them
apart, with float32 accumulation. A peak of None: the device has no unit for that type.
"""

from __future__ import annotations

from datetime import date

from utils.catalog import links
from utils.catalog.age import age_days, is_old
from utils.catalog.device_facts import Device
from utils.catalog.lookup import find
from utils.units import GB, MIB

_REPORTED = "total_memory that PyTorch printed in public logs"
_PRINTED = "total capacity that PyTorch prints when memory runs out, in public logs"
_A100_POWER = "glennklockwood.com/garden/processors/A100 (SXM4), after NVIDIA's data sheet"
_TDP = "verda.com/blog/gb300-nvl72-architecture, table of thermal design power"
_SPECS = "stas00/ml-engineering, compute/accelerator/README.md"
_READ = "2026-11-21"

_ROWS = [
    Device(
        name="T4", memory_gb=16, memory_bytes=15_095 * MIB, memory_bytes_per_second=320 * GB,
        capability=(7, 5), multiprocessors=40, fp32_tflops=8.1, fp16_tflops=65, host_link=links.PCIE_3_X16,
        memory_source=f"{_REPORTED} (15,095 to 15,110 MiB); 320 GB/s: sysrqmts.com, Tesla T4",
        flops_source="NVIDIA T4 data sheet, as listed in Lightning's throughput.py",
        as_of=_READ,
    ),
    Device(
        name="V100-16GB", memory_gb=16, memory_bytes=16_130 * MIB,
        memory_bytes_per_second=900 * GB, capability=(7, 0), multiprocessors=80, fp32_tflops=15.7,
        fp16_tflops=125, gpu_link=links.NVLINK_2, host_link=links.PCIE_3_X16,
        memory_source=f"{_REPORTED} (16,130 to 16,160 MiB); 900 GB/s: NVIDIA V100 data sheet",
        flops_source="NVIDIA V100 data sheet (SXM2), as listed in Lightning's throughput.py",
        as_of=_READ,
    ),
    Device(
        name="V100-32GB", memory_gb=32, memory_bytes=32_494 * MIB,
        memory_bytes_per_second=900 * GB, capability=(7, 0), multiprocessors=80, fp32_tflops=15.7,
        fp16_tflops=125, gpu_link=links.NVLINK_2, host_link=links.PCIE_3_X16,
        memory_source=f"{_REPORTED} (32,494 to 32,510 MiB); 900 GB/s: NVIDIA V100 data sheet",
        flops_source="NVIDIA V100 data sheet (SXM2), as listed in Lightning's throughput.py",
        as_of=_READ,
    ),
    Device(
        name="A10", memory_gb=24, memory_bytes=22_587 * MIB, memory_bytes_per_second=600 * GB,
        capability=(8, 6), multiprocessors=72, fp32_tflops=31.2, tf32_tflops=62.5, fp16_tflops=125, bf16_tflops=125,
        host_link=links.PCIE_4_X16,
        memory_source=f"{_REPORTED} for the A10G, which has the same memory (22,587 to 22,723 "
        "MiB); 600 GB/s: cli99/llm-analysis, A10 configuration",
        flops_source="NVIDIA A10 data sheet, as listed in MosaicML Composer's speed monitor",
        board_watts=150, power_source="gist.github.com/kimbochen, table of GPUs",
        as_of=_READ,
    ),
    Device(
        name="L4", memory_gb=24, memory_bytes=22_563 * MIB, memory_bytes_per_second=300 * GB,
        capability=(8, 9), multiprocessors=58, fp32_tflops=30.3, tf32_tflops=60, fp16_tflops=121, bf16_tflops=121,
        fp8_tflops=242.5, host_link=links.PCIE_4_X16,
        memory_source=f"{_REPORTED} (22,563 to 22,693 MiB); 300 GB/s: NVIDIA L4 data sheet",
        flops_source="NVIDIA L4 data sheet, its figures with sparsity halved",
        as_of=_READ,
    ),
    Device(
        name="RTX 3090", memory_gb=24, memory_bytes=24_259 * MIB,
        memory_bytes_per_second=936 * GB, capability=(8, 6), multiprocessors=82, fp32_tflops=35.6, tf32_tflops=35.6,
        fp16_tflops=71, bf16_tflops=71, host_link=links.PCIE_4_X16,
        memory_source=f"{_REPORTED} (24,259 to 24,268 MiB on Linux); 936 GB/s: NVIDIA GA102 paper",
        flops_source="NVIDIA GA102 white paper (float32 accumulation)",
        as_of=_READ,
    ),
    Device(
        name="RTX 4090", memory_gb=24, memory_bytes=24_217 * MIB,
        memory_bytes_per_second=1008 * GB, capability=(8, 9), multiprocessors=128, fp32_tflops=82.6,
        tf32_tflops=82.6, fp16_tflops=165.2, bf16_tflops=165.2, fp8_tflops=330.3,
        host_link=links.PCIE_4_X16,
        memory_source=f"{_REPORTED} (24,217 MiB on Linux); 1,008 GB/s: NVIDIA Ada white paper",
        flops_source="NVIDIA Ada white paper, appendix A (float32 accumulation)",
        as_of=_READ,
    ),
    Device(
        name="A100-40GB", memory_gb=40, memory_bytes=40_441 * MIB,
        memory_bytes_per_second=1555 * GB, capability=(8, 0), multiprocessors=108, fp32_tflops=19.5, tf32_tflops=156,
        fp16_tflops=312, bf16_tflops=312, gpu_link=links.NVLINK_3, host_link=links.PCIE_4_X16,
        matmul_ceiling_tflops=271.2, ceiling_source=f"{_SPECS}: measured on the 80 GB card",
        memory_source=f"{_REPORTED} (40,441 to 40,536 MiB); 1,555 GB/s: NVIDIA A100 data sheet",
        flops_source=f"{_SPECS} (SXM)",
        board_watts=400, power_source=_A100_POWER,
        as_of=_READ,
    ),
    Device(
        name="A100-80GB", memory_gb=80, memory_bytes=81_038 * MIB,
        memory_bytes_per_second=2039 * GB, capability=(8, 0), multiprocessors=108, fp32_tflops=19.5, tf32_tflops=156,
        fp16_tflops=312, bf16_tflops=312, gpu_link=links.NVLINK_3, host_link=links.PCIE_4_X16,
        matmul_ceiling_tflops=271.2, ceiling_source=f"{_SPECS}: maximum achievable, SXM",
        memory_source=f"{_REPORTED} (81,038 to 81,251 MiB); 2,039 GB/s: NVIDIA A100 data sheet",
        flops_source=f"{_SPECS} (SXM)",
        board_watts=400, power_source=_A100_POWER,
        as_of=_READ,
    ),
    Device(
        name="H100", memory_gb=80, memory_bytes=81_082 * MIB,
        memory_bytes_per_second=3350 * GB, capability=(9, 0), multiprocessors=132, fp32_tflops=67, tf32_tflops=494.5,
        fp16_tflops=989, bf16_tflops=989, fp8_tflops=1979, gpu_link=links.NVLINK_4,
        host_link=links.PCIE_5_X16, matmul_ceiling_tflops=794.5, fp8_ceiling_tflops=1402.6,
        ceiling_source=f"{_SPECS}: maximum achievable, SXM",
        memory_source=f"{_REPORTED} (81,082 to 81,090 MiB); 3,350 GB/s: {_SPECS} (SXM)",
        flops_source=f"{_SPECS} (SXM)",
        board_watts=700, power_source="tweaktown.com/news/97059 (SXM)",
        as_of=_READ,
    ),
    Device(
        name="H200", memory_gb=141, memory_bytes=143_156 * MIB,
        memory_bytes_per_second=4800 * GB, capability=(9, 0), multiprocessors=132, fp32_tflops=67, tf32_tflops=494.5,
        fp16_tflops=989, bf16_tflops=989, fp8_tflops=1979, gpu_link=links.NVLINK_4,
        host_link=links.PCIE_5_X16, matmul_ceiling_tflops=794.5, fp8_ceiling_tflops=1453.4,
        ceiling_source=f"{_SPECS}: bf16 as on H100, fp8 measured on H200, torch 2.7",
        memory_source=f"{_REPORTED} (143,156 MiB); 4,800 GB/s: {_SPECS} (SXM)",
        flops_source=f"{_SPECS} (SXM)",
        board_watts=700, power_source="gigazine.net/gsc_news/en/20240306-nvidia-gpu-1000w",
        as_of=_READ,
    ),
    Device(
        name="B200", memory_gb=180, memory_bytes=182_631 * MIB,
        memory_bytes_per_second=8000 * GB, capability=(10, 0), multiprocessors=148, fp32_tflops=80,
        tf32_tflops=1125, fp16_tflops=2250, bf16_tflops=2250, fp8_tflops=4500,
        gpu_link=links.NVLINK_5, host_link=links.PCIE_5_X16, matmul_ceiling_tflops=1745, fp8_ceiling_tflops=3432.5,
        ceiling_source=f"{_SPECS}: maximum achievable, SXM",
        memory_source=f"{_REPORTED} (182,631 to 182,642 MiB); 8,000 GB/s: {_SPECS} (SXM)",
        flops_source=f"{_SPECS} (SXM); fp32: glennklockwood.com/garden/processors/B200 (HGX)",
        board_watts=1000, power_source=_TDP,
        as_of=_READ,
    ),
    Device(
        name="B300", memory_gb=288, memory_bytes=274_109 * MIB,
        memory_bytes_per_second=8000 * GB, capability=(10, 3), multiprocessors=148, fp32_tflops=80,
        tf32_tflops=1125, fp16_tflops=2250, bf16_tflops=2250, fp8_tflops=4500,
        gpu_link=links.NVLINK_5, host_link=links.PCIE_5_X16, matmul_ceiling_tflops=1769,
        fp8_ceiling_tflops=3353.3, ceiling_source=f"{_SPECS}: maximum achievable, SXM",
        memory_source=f"{_PRINTED} (267.69 GiB); 8,000 GB/s: {_SPECS} (SXM)",
        flops_source=f"{_SPECS} (SXM), after NVIDIA's DGX B300 data sheet",
        board_watts=1100, power_source=_TDP,
        as_of=_READ,
    ),
    Device(
        name="GB200", memory_gb=186, memory_bytes=188_728 * MIB,
        memory_bytes_per_second=8000 * GB, capability=(10, 0), multiprocessors=148, fp32_tflops=80,
        tf32_tflops=1250, fp16_tflops=2500, bf16_tflops=2500, fp8_tflops=5000,
        gpu_link=links.NVLINK_5, host_link=links.NVLINK_C2C, matmul_ceiling_tflops=1822,
        fp8_ceiling_tflops=3615.6, ceiling_source=f"{_SPECS}: maximum achievable, GB200 SXM",
        memory_source=f"{_PRINTED} (184.31 GiB); 8,000 GB/s: {_SPECS} (GB200 SXM)",
        flops_source=f"{_SPECS}, one of the superchip's two GPUs, after NVIDIA's GB200 NVL72 page",
        board_watts=1200, power_source=_TDP,
        as_of=_READ,
    ),
    Device(
        name="GB300", memory_gb=278, memory_bytes=283_130 * MIB,
        memory_bytes_per_second=8000 * GB, capability=(10, 3), multiprocessors=148, fp32_tflops=80,
        tf32_tflops=1250, fp16_tflops=2500, bf16_tflops=2500, fp8_tflops=5000,
        gpu_link=links.NVLINK_5, host_link=links.NVLINK_C2C,
        memory_source=f"{_PRINTED} (276.50 GiB); 20 TB for 72: Google Cloud, A4X Max; 8,000 GB/s: "
        f"B300's, {_SPECS}",
        flops_source=f"{_SPECS}, after NVIDIA's GB300 NVL72 page",
        board_watts=1400, power_source=_TDP,
        as_of=_READ,
    ),
    Device(
        name="MI300X", vendor="AMD", memory_gb=192, memory_bytes=196_592 * MIB,
        memory_bytes_per_second=5300 * GB, capability=(9, 4), multiprocessors=304, fp32_tflops=163.4,
        tf32_tflops=653.7, fp16_tflops=1307, bf16_tflops=1307, fp8_tflops=2610,
        gpu_link=links.INFINITY_FABRIC_3, host_link=links.PCIE_5_X16, matmul_ceiling_tflops=668.4,
        ceiling_source=f"{_SPECS}: maximum achievable, torch 2.5 with ROCm 6.3",
        memory_source=f"{_REPORTED} (196,592 MiB); 5,300 GB/s: {_SPECS}, after AMD's page",
        flops_source=f"{_SPECS}, after AMD's MI300X page; the capability is ROCm's gfx942",
        as_of=_READ,
    ),
]  # fmt: skip

DEVICES: dict[str, Device] = {row.name: row for row in _ROWS}


def device(name: str) -> Device:
    """The GPU called `name`, in any case and spacing: `device("rtx4090")`.

    Raises:
        ValueError: no such device; the sentence gives the nearest names.
    """
    return find(DEVICES, name, "device")


def device_table(today: date | None = None) -> str:
    """All devices as text: memory, peak, board power, and the day that they were read and its age."""
    lines = [f"{'device':<12}{'GB':>5}{'TFLOP/s':>9}{'W':>6}  {'as of':<12}{'days':>5}"]
    for row in DEVICES.values():
        peak = row.bf16_tflops or row.fp16_tflops
        watts = "-" if row.board_watts is None else f"{row.board_watts:.0f}"
        flag = "  OLDER THAN A YEAR" if is_old(row.as_of, today) else ""
        lines.append(f"{row.name:<12}{row.memory_gb:>5}{peak:>9.0f}{watts:>6}  {row.as_of:<12}"
                     f"{age_days(row.as_of, today):>5}{flag}")  # fmt: skip
    return "\n".join(lines)
