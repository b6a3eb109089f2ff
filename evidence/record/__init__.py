"""Experiments that are run once on a named device, and what they left in evidence/results/."""

from evidence.record.registry import EXPERIMENTS
from evidence.record.store import Record, RecordError, recorded
from evidence.record.table import RecordedTable, recorded_table

__all__ = [
    "EXPERIMENTS",
    "Record",
    "RecordError",
    "RecordedTable",
    "recorded",
    "recorded_table",
]
