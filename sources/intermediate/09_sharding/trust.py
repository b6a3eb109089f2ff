"""How far the planner can be trusted here: beside the simulation, beside published runs, and stretched."""

from __future__ import annotations

from collections.abc import Mapping

from evidence.validation import foundry
from utils.catalog import ModelShape
from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.planner import Batch, estimate
from utils.units import GB

from .speed import FP32_GRADIENTS, GPUS, RATES_GB, SCHEMES, line_share, peak_gb, speed

Row = dict[str, str | float]


def beside_simulation(
    shape: ModelShape, steps: Mapping[str, Mapping[int, Measurement]]
) -> list[Row]:
    """Peaks of a step of two micro-batches of two sequences, planned and simulated.

    The planner's DDP computes in bf16 throughout: beside it stand DDP under autocast, and FSDP2 on
    one rank, which shards nothing.
    """
    batch = Batch(sequences=2 * 2 * GPUS, sequence_length=2048)
    pairs = {
        "DDP under autocast": ("DDP", "DDP", GPUS),
        "nothing sharded, bf16": ("DDP", "FSDP2", 1),
    }
    pairs |= {name: (name, name, GPUS) for name in steps if name != "DDP"}
    return [
        {
            "": label,
            "planner, GB": peak_gb(shape, batch, SCHEMES[planned].plan(2)),
            "simulated, GB": steps[name][ranks].peak_bytes / GB,
        }
        for label, (planned, name, ranks) in pairs.items()
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
                "tokens/s/GPU, published": f"{published:,}",
                "planner's error": f"{told.tokens_per_second / gpus / published - 1:+.0%}",
                "set its constants": "yes" if index % 2 == 0 else "no",
            }
        )
    return rows


def verdict_stretched(shape: ModelShape, batch: Batch) -> list[Row]:
    """HSDP's speed over DDP's by the network's rate: as in the answer, then with one thing changed."""
    cases = {
        "as above: both two at once": (SCHEMES, 2, 2, 1.0),
        "links half as fast": (SCHEMES, 2, 2, 0.5),
        "links twice as fast": (SCHEMES, 2, 2, 2.0),
        "gradients in fp32": (FP32_GRADIENTS, 2, 2, 1.0),
        "both four at once": (SCHEMES, 4, 4, 1.0),
        "HSDP four, DDP two": (SCHEMES, 4, 2, 1.0),
    }
    rows: list[Row] = []
    for label, (schemes, four, two, factor) in cases.items():
        hsdp, ddp = schemes["HSDP 8 x 8"].plan(four), schemes["DDP"].plan(two)
        row: Row = {"": label}
        row |= {"HSDP, GB": peak_gb(shape, batch, hsdp), "DDP, GB": peak_gb(shape, batch, ddp)}
        for gb in RATES_GB:
            its, own = (speed(shape, batch, plan, factor * gb) for plan in (ddp, hsdp))
            gain = round(own / its - 1, 2)
            row[f"HSDP's speed at {gb:g} GB/s"] = f"{gain:+.0%}" if gain else "equal"
        rows.append(row)
    return rows


def links() -> str:
    """What the planner lets collectives use of a link."""
    shares = (line_share(RATES_GB[0]), line_share(RATES_GB[-1]))
    return "of a link's line rate the planner uses {:.2f} on InfiniBand, {:.2f} on TCP".format(
        *shares
    )


__all__ = ["beside_published", "beside_simulation", "links", "verdict_stretched"]

check_public(globals())
