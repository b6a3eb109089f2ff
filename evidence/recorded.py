"""`python -m evidence.recorded`: what a GPU's allocator counted, beside what the simulator says of the program.

Both tables were written on one H200 (their first line says with what): the second step of each
program, from `torch.cuda.memory_stats()`. `requested_peak_bytes` is what tensors and cuBLAS's
workspaces asked for, without the allocator's rounding. Several programs ran in one process: of
`fits`, `left_bytes` is what an earlier one had left alive.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from evidence.record import gpt1b_recompute
from evidence.record.store import RESULTS, Row, recorded
from evidence.validation.comparison import Comparison, summarize
from evidence.validation.report import print_summaries
from utils.catalog import model_shape
from utils.fitting import Recipe
from utils.fitting.model_configs import auto_class, model_config
from utils.fitting.recipe_simulation import simulated_step
from utils.fitting.seconds import predicted_seconds
from utils.memory import Measurement
from utils.models import llama_config
from utils.models.finetune import build_finetune, finetune_step
from utils.simulation import simulate
from utils.units import GB

FOLDER = RESULTS / "nvidia-h200"
CARD = "H200"
QUICK = (0, 2, 6, 9)  # rows that each run of the validation simulates


@dataclass(frozen=True)
class RecordedFit:
    """A fine-tune as it ran on the GPU."""

    model: str
    recipe: Recipe
    peak_bytes: int  # tensors and workspaces
    reserved_bytes: int
    step_seconds: float

    def simulated(self) -> Measurement:
        """The same step, simulated."""
        config = model_config(self.model)
        return simulated_step(auto_class(config), config, self.recipe, CARD, self.model)


def rows(name: str) -> list[dict[str, str]]:
    """A table of what was recorded: "fits" or "programs"."""
    with open(FOLDER / f"{name}.csv", newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def recorded_fine_tunes() -> list[RecordedFit]:
    """The fine-tunes, in the order in which they ran."""
    return [
        RecordedFit(
            row["model"],
            Recipe(**json.loads(row["recipe"])),
            int(row["requested_peak_bytes"]) - int(row["left_bytes"]),
            int(row["reserved_peak_bytes"]) - int(row["left_bytes"]),
            float(row["median_step_seconds"]),
        )
        for row in rows("fits")
    ]


def comparisons(*, every: bool = False) -> Iterator[Comparison]:
    """Simulated beside recorded peaks, GB; of a few fine-tunes, or of all."""
    found = recorded_fine_tunes()
    for row in found if every else [found[index] for index in QUICK]:
        step, case = row.simulated(), f"{row.model}, {row.recipe}"
        yield Comparison(
            "fit: H200, recorded", "allocated GB", case, row.peak_bytes / GB, step.peak_bytes / GB
        )
        yield Comparison(
            "fit: H200, recorded",
            "reserved GB",
            case,
            row.reserved_bytes / GB,
            (step.reserved_bytes or 0) / GB,
        )
        if seconds := predicted_seconds(model_config(row.model), row.recipe, CARD):
            yield Comparison(
                "fit: H200, recorded", "step seconds", case, row.step_seconds, seconds[1]
            )


def experiment_rows(name: str) -> list[Row]:
    """What `python -m evidence.record NAME` kept of the steps that the GPU completed."""
    found = [record for record in recorded(name) if record.provenance["device"] == "NVIDIA H200"]
    return [row for record in found for row in record.rows if row["completed"]]


def simulated_gpt(row: Row) -> Measurement:
    """The step of a row of `gpt1b_recompute`, simulated."""
    cuda, config = torch.device("cuda"), gpt1b_recompute.LARGE

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens = gpt1b_recompute.batch(config, row["micro_batch"], row["sequence_length"], cuda)
        gpt1b_recompute.training_step(model, optimizer, tokens)

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return gpt1b_recompute.build(config, row["checkpointed"], cuda)

    return simulate(build, step, device=CARD, values=True)


def simulated_adapters(row: Row) -> Measurement:
    """The step of a row of `llama7b_adapters`, simulated."""
    config = llama_config(model_shape("llama-2-7b"))

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        finetune_step(model, optimizer, row["micro_batch"], row["sequence_length"])

    return simulate(
        lambda: build_finetune(config, row["method"], device="cuda"), step, device=CARD, values=True
    )


if __name__ == "__main__":
    print_summaries(summarize(comparisons(every="--all" in sys.argv)))
