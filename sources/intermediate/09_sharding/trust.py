"""How far the planner can be trusted here: beside the simulation, beside published runs, and stretched."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

from evidence.validation import foundry
from utils.catalog import ModelShape
from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.planner import Batch, calibration, estimate
from utils.units import GB

from .speed import (
    GPUS,
    HSDP,
    RATES_GB,
    SCHEMES,
    UNSHARDED,
    Scheme,
    line_share,
    peak_gb,
    speed,
    with_fp32_gradients,
)

Row = dict[str, str | float]


def beside_simulation(
    shape: ModelShape, steps: Mapping[str, Mapping[int, Measurement]]
) -> list[Row]:
    """Peaks of a step of two micro-batches of two sequences, planned and simulated."""
    batch = Batch(sequences=2 * 2 * GPUS, sequence_length=2048)
    return [
        {
            "": name,
            "planner, GB": peak_gb(shape, batch, scheme.plan(2)),
            "simulated, GB": steps[name][GPUS].peak_bytes / GB,
        }
        for name, scheme in SCHEMES.items()
        if name in steps
    ]


def beside_published() -> list[Row]:
    """llm-foundry's runs of 1.3B by FSDP on A100 of 40 GB: tokens per second of a GPU."""
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
                "g": row["grad_accum"],
                "tokens/s/GPU, published": f"{published:,}",
                "planner's error": f"{told.tokens_per_second / gpus / published - 1:+.0%}",
                "set its constants": "yes" if index % 2 == 0 else "no",
            }
        )
    return rows


def verdict_stretched(shape: ModelShape, batch: Batch, keep: float = 0.95) -> list[Row]:
    """Of the schemes that keep a share of unsharded speed, the one of the least peak.

    By the network's rate: as in the answer, then with one thing changed.
    """
    closer, wider = 1 - (1 - keep) / 2, 1 - 2 * (1 - keep)
    in_fp32 = {name: with_fp32_gradients(scheme) for name, scheme in SCHEMES.items()}
    cases = {
        "as above": (SCHEMES, keep, 1.0, 1.0),
        "compute loses half as much to collectives": (SCHEMES, keep, 1.0, 0.5),
        "compute loses twice as much to collectives": (SCHEMES, keep, 1.0, 2.0),
        "links half as fast": (SCHEMES, keep, 0.5, 1.0),
        "links twice as fast": (SCHEMES, keep, 2.0, 1.0),
        "gradients in fp32": (in_fp32, keep, 1.0, 1.0),
        f"{closer:.1%} of speed asked": (SCHEMES, closer, 1.0, 1.0),
        f"{wider:.1%} of speed asked": (SCHEMES, wider, 1.0, 1.0),
    }
    rows: list[Row] = []
    for label, (schemes, least, faster, slows) in cases.items():
        row: Row = {"": label}
        with mock.patch.object(calibration, "CONTENTION", slows * calibration.CONTENTION):
            for rate in RATES_GB:
                name, gain = leanest(shape, batch, schemes, least, faster * rate)
                row[f"at {rate:g} GB/s"] = f"{name}, {gain:+.1%}"
        rows.append(row)
    return rows


def leanest(
    shape: ModelShape, batch: Batch, schemes: Mapping[str, Scheme], keep: float, network_gb: float
) -> tuple[str, float]:
    """The scheme of the least peak among those that keep that share of unsharded speed, and its gain.

    Of peaks that are equal to a tenth of a GB the fastest.
    """
    plans = {name: scheme.plan(2) for name, scheme in schemes.items()}
    tokens = {name: speed(shape, batch, plan, network_gb) for name, plan in plans.items()}
    kept = [name for name in plans if tokens[name] >= keep * tokens[UNSHARDED]]
    name = min(kept, key=lambda n: (round(peak_gb(shape, batch, plans[n]), 1), -tokens[n]))
    return name, tokens[name] / tokens[UNSHARDED] - 1


def job_rows(shape: ModelShape, batch: Batch) -> list[str]:
    """HSDP as its job runs, gradients in fp32, two and four at once, beside unsharded two at once."""
    its, own = (with_fp32_gradients(SCHEMES[name]) for name in (UNSHARDED, HSDP))
    lines: list[str] = []
    for count, says in ((2, "two"), (4, "four")):
        gains = {
            rate: speed(shape, batch, own.plan(count), rate)
            / speed(shape, batch, its.plan(2), rate)
            - 1
            for rate in RATES_GB
        }
        speeds = ", ".join(f"{gain:+.1%} at {rate:g} GB/s" for rate, gain in gains.items())
        lines.append(f"{says} at once: {peak_gb(shape, batch, own.plan(count)):.1f} GB, {speeds}")
    return lines


def links() -> str:
    """What the planner lets collectives use of a link, and what they take from compute."""
    fast, slow = line_share(RATES_GB[0]), line_share(RATES_GB[-1])
    return (
        f"of a link's line rate the planner uses {fast:.2f} on InfiniBand, {slow:.2f} on TCP; "
        f"compute loses {calibration.CONTENTION:.2f} of the seconds of collectives beside it"
    )


__all__ = [
    "beside_published",
    "beside_simulation",
    "job_rows",
    "leanest",
    "links",
    "verdict_stretched",
]

check_public(globals())
