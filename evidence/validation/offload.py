"""Published runs with offload: ZeRO-Offload on one V100, its CPU Adam, ZeRO-Infinity on one DGX-2.

The rates of compute and links are published ones of other runs, never those of the rows compared.
"""

from __future__ import annotations

from evidence.validation.comparison import Comparison
from evidence.validation.tables import table, whole
from utils.planner.offload import CHECKPOINTED_FLOPS, SCHEMES, step_seconds
from utils.planner.step_seconds.step_end import ADAM_BYTES, HOST_ADAM_SECONDS
from utils.units import GB

# One V100 without offload sustains 39 TFLOP/s (Shoeybi et al. 2019, arXiv:1909.08053, abstract).
V100_FLOPS_PER_SECOND = 39e12
# The same with ZeRO-Infinity's wide models, all transfers switched off: 62 to 78, 70 on average
# (Rajbhandari et al. 2021, arXiv:2104.07857, section 4.2).
V100_WIDE_FLOPS_PER_SECOND = 70e12
# Its sections 5.2 and 5.2.1: what one GPU of a DGX-2 gets from its host alone, and what the 16 get
# together from the CPU's memory and from NVMe.
PCIE_BYTES_PER_SECOND, CPU_BYTES_PER_SECOND, NVME_BYTES_PER_SECOND = 12 * GB, 48 * GB, 25 * GB
DGX2_GPUS = 16
# Six channels of DDR4-2666, one socket of the two (Intel Xeon Platinum 8168).
SOCKET_BYTES_PER_SECOND = 6 * 8 * 2.666 * GB
STATE_BYTES = 16  # master copy, gradient and moments in fp32; read and written in a step


def parameters_of(layers: int, hidden: int) -> float:
    """Of a GPT's blocks, 12 L h^2: what both papers count."""
    return 12.0 * layers * hidden**2


def zero_offload_comparisons(*, overlap: bool = False) -> list[Comparison]:
    """TFLOP/s of one V100 with ZeRO-Offload, from 1 to 13 billion parameters.

    Each micro-batch sends its gradients. `overlap` hides them behind compute, as the paper draws it;
    without it they wait for each other, since the CPU adds them up.
    """
    rows, scheme = [], SCHEMES["gradients, too"]
    for row in table("zero_offload_throughput"):
        count = parameters_of(whole(row["layers"]), whole(row["hidden"]))
        tokens = whole(row["micro_batch"]) * whole(row["sequence"])
        flops = CHECKPOINTED_FLOPS * count * tokens
        micro_batches = 512 // whole(row["micro_batch"])
        down, up = (size / PCIE_BYTES_PER_SECOND for size in scheme.link_bytes(count))
        each = step_seconds(flops / V100_FLOPS_PER_SECOND, down, 0.0, overlap=overlap)
        seconds = micro_batches * each + up + count * HOST_ADAM_SECONDS
        rate = micro_batches * flops / seconds / 1e12
        rows.append(
            Comparison(
                "ZeRO-Offload Figure 8",
                "TFLOP/s of one V100",
                f"{row['params_b']}B",
                float(row["tflops"]),
                rate,
                size=1.0,
            )
        )
    return rows


def cpu_adam_comparisons() -> list[Comparison]:
    """Seconds of a step of DeepSpeed's CPU Adam, from the bytes it moves through one socket."""
    return [
        Comparison(
            "ZeRO-Offload Table 4",
            "seconds of CPU-Adam",
            f"{row['params_b']}B",
            float(row["cpu_adam_s"]),
            float(row["params_b"]) * 1e9 * ADAM_BYTES / SOCKET_BYTES_PER_SECOND,
            size=float(row["params_b"]),
        )
        for row in table("zero_offload_adam")
    ]


def zero_infinity_comparisons() -> list[Comparison]:
    """TFLOP/s of a GPU of one DGX-2, states on NVMe: weights hide behind compute, states do not."""
    rates = {"cpu": CPU_BYTES_PER_SECOND, "nvme": NVME_BYTES_PER_SECOND}
    rows = []
    for row in table("zero_infinity_node"):
        count = parameters_of(whole(row["layers"]), whole(row["hidden"]))
        tokens = 1024 * whole(row["batch_per_gpu"])
        flops = CHECKPOINTED_FLOPS * count * tokens  # of one GPU
        down, up = SCHEMES["weights, too"].link_bytes(count)
        link = rates[row["weights_in"]]
        states = 2 * STATE_BYTES * count / rates[row["states_in"]]
        seconds = step_seconds(flops / V100_WIDE_FLOPS_PER_SECOND, down / link, up / link, states)
        rows.append(
            Comparison(
                "ZeRO-Infinity Figure 5c",
                "TFLOP/s of a V100",
                f"{row['params_b']}B",
                float(row["tflops"]),
                flops / seconds / 1e12,
                size=1.0,
            )
        )
    return rows


def comparisons() -> list[Comparison]:
    """All three."""
    return [*zero_offload_comparisons(), *cpu_adam_comparisons(), *zero_infinity_comparisons()]
