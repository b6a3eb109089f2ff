"""The general cures of the clinic, as wrappers around any patient."""

from __future__ import annotations

from typing import Any

from utils.checked import check_public
from utils.clinic import Patient
from utils.techniques import checkpoint_blocks


def accumulated(patient: Patient, parts: int = 8) -> Patient:
    """Each batch in parts, one after the other."""
    return patient.treated(train=lambda model, optimizer: patient.train(model, optimizer, parts))


def checkpointed(patient: Patient) -> Patient:
    """Every block computed again in backward."""

    def build() -> tuple[Any, Any]:
        model, optimizer = patient.build()
        return checkpoint_blocks(model), optimizer

    return patient.treated(build=build)


__all__ = ["accumulated", "checkpointed"]

check_public(globals())
