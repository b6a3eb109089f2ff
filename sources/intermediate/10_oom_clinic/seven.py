"""The patients of the lesson: six of the clinic, and one that only this lesson has."""

from __future__ import annotations

from utils.checked import check_public
from utils.clinic import Patient, admit
from utils.clinic.ward import PATIENTS

from . import long_batch
from .long_batch import LENGTHS

SIX = PATIENTS[:-1]  # the last one is the lab's
SCRIPTS = (*SIX, long_batch)
NAMES = (*SIX, "long_batch")
NUMBERED = {
    f"patient {number}": name for number, name in enumerate(NAMES, 1)
}  # before it has a name


def seven() -> dict[str, Patient]:
    """The patients by name, as they came in."""
    return {patient.name: patient for patient in map(admit, SCRIPTS)}


__all__ = ["LENGTHS", "NAMES", "NUMBERED", "seven"]

check_public(globals())
