"""Published runs like the one that is planned, beside the planner: Ampere, 175B to 530B parameters.

No constant of the planner was set on any of these rows. Narayanan's ZeRO-3 is left out: that
DeepSpeed uses one port was read off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from evidence.validation import bloom, scale
from evidence.validation.times import narayanan_table_2
from utils.catalog import model_shape
from utils.planner import Batch, Cluster, Plan, estimate
from utils.planner.estimate import BYTES_INTERVAL, SECONDS_INTERVAL
from utils.planner.flops import hardware_flops
from utils.units import GB, Evidence
from utils.views.style import course_style, print_evidence

# Zhao et al. 2023 (arXiv:2304.11277), section 5.4: TFLOP/s of a GPU, recomputation counted, by
# micro-batch. minGPT-175B on up to 512 A100 with 2 Tb/s of RoCE a node, 50,000 words, 2,048 tokens.
FSDP_TFLOPS = {1: 173.0, 2: 186.0}
FSDP_GPUS = 512

__all__ = ["Relative", "draw_relatives", "relatives"]

DOT, BAND = "#3f90da", "#d9d9d9"


class Relative(NamedTuple):
    """One published table beside the planner.

    Attributes:
        name: Whose runs.
        interval: Which multiples of a prediction the planner says that a run may take.
        ratios: Published over predicted, run by run: above 1 the planner said too little.
    """

    name: str
    interval: tuple[float, float]
    ratios: tuple[float, ...]

    @property
    def inside(self) -> int:
        """Runs within the interval."""
        low, high = self.interval
        return sum(low <= ratio <= high for ratio in self.ratios)


def relatives() -> list[Relative]:
    """Seconds first, then bytes."""
    rates = [row for row in narayanan_table_2() if row.scheme == "PTD"]
    steps = {  # rates: the planner's over the published ones are the times' the other way
        "Narayanan 2021, 175B and 530B": [row.predicted / row.published for row in rates]
    }
    for name, rows in (
        ("BLOOM 2022, 175B to 200B", bloom.seconds_comparisons()),
        ("Megatron-LM in MegaScale 2024, 175B", scale.megascale_comparisons()),
    ):
        steps[name] = [row.published / row.predicted for row in rows if not row.fitted]
    steps["FSDP 2023, ZeRO-3, 175B"] = [_fsdp_tflops(b) / rate for b, rate in FSDP_TFLOPS.items()]
    held = [row.published / row.predicted for row in bloom.memory_comparisons() if not row.fitted]
    found = [Relative(f"{k}: seconds", SECONDS_INTERVAL, tuple(v)) for k, v in steps.items()]
    return [*found, Relative("BLOOM 2022, 175B to 200B: bytes", BYTES_INTERVAL, tuple(held))]


def _fsdp_tflops(micro_batch: int) -> float:
    """The planner's TFLOP/s of a GPU for FSDP's runs."""
    model = replace(model_shape("megatron-175b"), name="minGPT-175B", vocabulary=50_000)
    cluster = Cluster(
        gpu="A100-80GB",
        nodes=FSDP_GPUS // 8,
        network_bytes_per_second=250 * GB,
        network_kind="RoCE",
    )
    plan = Plan(
        dp=FSDP_GPUS, zero_stage=3, recompute="full", micro_batch=micro_batch, framework="fsdp"
    )
    batch = Batch(sequences=FSDP_GPUS * micro_batch, sequence_length=2048)
    found = estimate(model, cluster, plan, batch)
    return hardware_flops(model, plan, batch) / found.step_seconds / FSDP_GPUS / 1e12


def draw_relatives(rows: Sequence[Relative]) -> Figure:
    """Every run as a dot, over the interval that the planner promises.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("draw_relatives() needs rows; relatives() gives them.")
    jitter = np.random.default_rng(0)
    with course_style():
        figure = Figure(figsize=(10.5, 1.7 + 0.55 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for height, row in enumerate(rows):
            low, high = row.interval
            axes.barh(height, high - low, left=low, height=0.7, color=BAND, zorder=1)
            places = height + jitter.uniform(-0.22, 0.22, len(row.ratios))
            axes.scatter(row.ratios, places, s=24, color=DOT, linewidths=0, zorder=3)
        axes.axvline(1.0, color="black", lw=1, zorder=2)
        names = [f"{row.name}\n{row.inside} of {len(row.ratios)} runs inside" for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel("published / predicted; right of 1 the planner promised too much")
        axes.set_title("Published runs on Ampere GPUs that no constant was set on")
        band = Patch(color=BAND, label="the planner's interval, as in days and margin below")
        figure.legend(handles=[band], loc="outside lower center")
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure
