"""The out-of-memory clinic: patients, their examination, snapshots and traces."""

from utils.checked import check_public
from utils.clinic.host import HostRun, run_loader
from utils.clinic.pages import VIEWS, TraceError, read_trace, write_snapshot_page, write_trace_page
from utils.clinic.replay import Replay, pinned_bytes, replay, smallest_capacity
from utils.clinic.snapshot import SnapshotError, read_snapshot, snapshot_of, write_snapshot
from utils.clinic.ward import (
    LOSS_TOLERANCE,
    PATIENTS,
    Examination,
    NothingToCureError,
    Patient,
    admit,
    examine,
    numbered,
    sick,
    source_of,
)

__all__ = [
    "LOSS_TOLERANCE", "PATIENTS", "VIEWS", "Examination", "HostRun", "NothingToCureError", "Patient",
    "Replay", "SnapshotError", "TraceError", "admit", "examine", "numbered", "pinned_bytes",
    "read_snapshot", "read_trace", "replay", "run_loader", "sick", "smallest_capacity", "snapshot_of",
    "source_of", "write_snapshot", "write_snapshot_page", "write_trace_page",
]  # fmt: skip

check_public(globals())
