"""How far the planner can be trusted here: beside the simulation, beside published runs, and stretched."""

from __future__ import annotations

from collections.abc import Mapping

from evidence.validation import foundry
from utils.catalog import SUSTAINED, ModelShape
from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.planner import Batch, calibration, estimate, framework
from utils.units import GB

from .speed import (
    FP32_GRADIENTS,
    GPUS,
    RATES_GB,
    SCHEMES,
    Scheme,
    largest,
    line_share,
    peak_gb,
    speed,
)

SEVEN = ModelShape(
    name="7B",
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    feedforward=11008,
    vocabulary=32000,
    max_sequence=2048,
)

Row = dict[str, str | float]


def beside_simulation(
    shape: ModelShape, steps: Mapping[str, Mapping[int, Measurement]]
) -> list[Row]:
    """Peaks of a step of two micro-batches of two sequences, planned and simulated.

    The planner's DDP computes in bf16 throughout, as FSDP2 does: beside it stands FSDP2 on one rank.
    """
    batch = Batch(sequences=2 * 2 * GPUS, sequence_length=2048)
    own = Scheme(framework("fsdp"), 3)  # transformers' norms and loss
    pairs = {"nothing sharded, bf16": (SCHEMES["DDP"], "FSDP2", 1)}
    pairs |= {name: (SCHEMES[name], name, GPUS) for name in steps if name != "DDP"}
    pairs["FSDP2, transformers' norms and loss"] = (own, "FSDP2", GPUS)
    return [
        {
            "": label,
            "planner, GB": peak_gb(shape, batch, scheme.plan(2)),
            "simulated, GB": steps[name][ranks].peak_bytes / GB,
        }
        for label, (scheme, name, ranks) in pairs.items()
    ]


def beside_published() -> list[Row]:
    """llm-foundry's runs of 1.3B by FSDP on A100 of 40 GB: tokens per second of a GPU, and the peak."""
    rows: list[Row] = []
    for index, row in foundry.lines():
        if (row["model"], row["seq_len"], row["gpu"]) != ("1b", "2048", "a100_40gb"):
            continue
        told, gpus = estimate(*foundry.setup(row)), int(row["n_gpus"])
        published = int(row["throughput_tok_s_gpu"])
        rows.append(
            {
                "GPUs": row["n_gpus"],
                "at once": row["micro_batch_size"],
                "tokens/s/GPU, published": f"{published:,}",
                "planner": f"{told.tokens_per_second / gpus / published - 1:+.0%}",
                "planner's peak, GB": told.peak.allocated_bytes / GB,
                "set its constants": "yes" if index % 2 == 0 else "no",
            }
        )
    return rows


def verdict_stretched(shape: ModelShape, batch: Batch) -> str:
    """HSDP's speed over DDP's, each with as many at once as fit, with links half and twice as fast."""
    lines = [
        f"of their line rate links carry, in the planner, {line_share(RATES_GB[0]):.2f} on InfiniBand "
        f"and {line_share(RATES_GB[-1]):.2f} on TCP:",
        *(
            f"  {SUSTAINED[kind].share:g} on {kind} ({SUSTAINED[kind].source})"
            for kind in ("InfiniBand", "TCP")
        ),
        f"  and of that {calibration.BESIDE_TRAINING:g} inside a training step (fitted on published runs)",
    ]
    for label, schemes in (("bf16", SCHEMES), ("fp32", FP32_GRADIENTS)):
        ddp, hsdp = (largest(shape, batch, schemes[name]) for name in FP32_GRADIENTS)
        for factor in (0.5, 1, 2):
            gains = (
                f"{speed(shape, batch, hsdp, factor * gb) / speed(shape, batch, ddp, factor * gb) - 1:+.0%} "
                f"at {gb:g} GB/s"
                for gb in RATES_GB
            )
            lines.append(
                f"HSDP over DDP, gradients in {label}, links x {factor:g}: {', '.join(gains)} (predicted)"
            )
    return "\n".join(lines)


def seven_billion(batch: Batch) -> str:
    """Peaks of a model whose states no card holds whole."""
    peaks = (
        f"{name} {peak_gb(SEVEN, batch, SCHEMES[name].plan(1, 'full')):.1f} GB"
        for name in ("DDP", "HSDP 8 x 8", "FSDP2")
    )
    return f"7B, {SEVEN.parameter_count / 1e9:.2f} billion parameters, one sequence at once, recomputed: {', '.join(peaks)} (predicted)"


__all__ = ["beside_published", "beside_simulation", "seven_billion", "verdict_stretched"]

check_public(globals())
