"""The fragmented patient of lesson 10 on a real allocator, sick and cured, beside its replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from evidence.record.experiment import Experiment, Stage, Trial, measured_row
from evidence.record.store import Row
from utils.clinic import Patient, admit, examine, replay

CURE: Mapping[str, str] = {
    "losses, kept = [], []": (
        "losses, kept = [], []\n    room = iter(torch.empty(STEPS, ROWS, FEATURES, device=device))"
    ),
    "kept.append(model(probe))": "kept.append(next(room).copy_(model(probe)))",
}


@dataclass(frozen=True)
class Run:
    """One row: the patient as it came in, or cured."""

    cured: bool
    device: torch.device

    def run(self, stage: Stage) -> Row:
        """All of its steps under the meter; what the replay of the same requests reserves beside."""
        patient = admit("fragmentation")
        patient = patient.edited(CURE) if self.cured else patient
        stage.name = "run"
        found = examine(moved(patient, self.device))
        replayed = replay(found.run.timeline).allocator
        return {
            "last_loss": found.losses[-1],
            "replayed_reserved_peak_bytes": replayed.reserved_peak_bytes,
            **measured_row(found.run),
        }


def moved(patient: Patient, device: torch.device) -> Patient:
    """The patient with its model on another device."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = patient.build()
        return model.to(device), optimizer  # the optimizer's parameters move with it

    return patient.treated(build=build)


def trials(device: torch.device) -> list[Trial]:
    """The patient sick, then cured."""
    return [Trial({"cured": cured}, Run(cured, device).run) for cured in (False, True)]


EXPERIMENT = Experiment(
    name="oom_fragmentation",
    summary="lesson 10's fragmented patient, sick and cured: reserved against allocated",
    configuration={
        "patient": "utils/clinic/patients/fragmentation.py",
        "cure": "room for all features before the first step",
        "steps": "10, all metered, from the first on",
    },
    trials=trials,
)
