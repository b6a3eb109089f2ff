"""Experiments that are run once on a named device, and what they left in results/."""

from utils.record.registry import EXPERIMENTS
from utils.record.store import Record, RecordError, recorded
from utils.record.table import RecordedTable, recorded_table

__all__ = [
    "EXPERIMENTS", "Record", "RecordError", "RecordedTable", "recorded", "recorded_table",
]  # fmt: skip
