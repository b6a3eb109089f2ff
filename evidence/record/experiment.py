"""What an experiment is, and how its trials become rows: one that runs out of memory is a row too."""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from evidence.record.store import Row
from utils.memory import Measurement, OverBudgetError
from utils.memory.budgets import is_out_of_memory
from utils.shims.torch_ import clear_cublas_workspaces
from utils.units import parse_bytes

_WANTED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)


class Stage:
    """What a trial is doing: a row that fails says where."""

    def __init__(self) -> None:
        self.name = "set-up"


@dataclass(frozen=True)
class Trial:
    """One row to come: its settings, and what measures the rest."""

    settings: Mapping[str, Any]
    run: Callable[[Stage], Row]


@dataclass(frozen=True)
class Experiment:
    """What `python -m evidence.record NAME` runs.

    `trials` makes the list for a device; an experiment that does not suit the device has none.
    """

    name: str
    summary: str
    configuration: Mapping[str, Any]
    trials: Callable[[torch.device], Sequence[Trial]]


def run_trials(
    trials: Sequence[Trial], device: torch.device, title: str, ends: float = math.inf
) -> list[Row]:
    """Run the trials one after the other, each on a device that the others have left.

    `ends` is a time of `time.monotonic`: after it no trial is begun, and the rows so far are returned.
    """
    rows: list[Row] = []
    for trial in tqdm(trials, desc=title, unit="row"):
        if time.monotonic() > ends:
            break
        free_memory(device)
        rows.append(run_trial(trial))
    free_memory(device)
    return rows


def run_trial(trial: Trial) -> Row:
    """The trial's row. Out of memory: a row with "completed": false that says what did not fit.

    Raises:
        RuntimeError: whatever else went wrong in the trial.
    """
    stage = Stage()
    try:
        return {**trial.settings, "completed": True, **trial.run(stage)}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {**trial.settings, "completed": False, **_shortage(error, stage)}


def free_memory(device: torch.device) -> None:
    """Give back what the last trial held."""
    gc.collect()  # a failed trial's frames hold tensors in reference cycles
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # cuBLAS keeps a workspace of tens of MB from its first matmul on. Dropped here, it is
        # taken again inside the next recording, so that the meter sees what the allocator sees.
        clear_cublas_workspaces()
        torch.cuda.empty_cache()


def measured_row(measurement: Measurement) -> Row:
    """What a record keeps of a measurement. Sizes in bytes, times in seconds."""
    peak_bytes = measurement.peak_bytes
    others = {
        f"{name.replace(' ', '_')}_bytes": size
        for name, size in measurement.allocator_bytes.items()
    }
    row: Row = {
        "peak_bytes": peak_bytes,
        "peak_phase": measurement.peak_phase,
        "breakdown": {str(c): size for c, size in measurement.breakdown.items()},
        **others,
        "source": measurement.source,
        "step_seconds": list(measurement.step_seconds),
        "median_step_seconds": measurement.median_step_seconds,
        f"{measurement.unit}_per_second": measurement.items_per_second,
    }
    for name in ("requested", "allocated"):
        if f"{name}_peak_bytes" in others:
            row[f"meter_to_{name}"] = peak_bytes / others[f"{name}_peak_bytes"]
    return row


def _shortage(error: RuntimeError, stage: Stage) -> Row:
    """Where memory was short, and what did not fit, as far as the error tells."""
    crossing = error.crossing if isinstance(error, OverBudgetError) else None
    if crossing is not None:
        phase, wanted = crossing.phase, crossing.wanted_bytes
    else:
        found = _WANTED.search(str(error))
        unit = {"bytes": "B"}.get(found[2], found[2]) if found else ""
        phase, wanted = stage.name, parse_bytes(found[1] + unit) if found else None
    return {"failed_in": phase, "wanted_bytes": wanted, "error": str(error).splitlines()[0][:200]}
