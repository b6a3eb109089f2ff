"""The out-of-memory clinic: patients and their examination."""

from utils.checked import check_public
from utils.clinic.allocator_replay import Replay, pinned_bytes, replay, smallest_capacity
from utils.clinic.ward import (
    LOSS_TOLERANCE,
    PATIENTS,
    Examination,
    NothingToCureError,
    Patient,
    admit,
    examine,
    examine_over_budget,
    numbered,
    source_of,
)

__all__ = [
    "LOSS_TOLERANCE",
    "PATIENTS",
    "Examination",
    "NothingToCureError",
    "Patient",
    "Replay",
    "admit",
    "examine",
    "examine_over_budget",
    "numbered",
    "pinned_bytes",
    "replay",
    "smallest_capacity",
    "source_of",
]  # fmt: skip

check_public(globals())
