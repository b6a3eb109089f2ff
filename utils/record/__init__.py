"""Experiments that are run once on a named device, and what they left in results/."""

from utils.record.registry import EXPERIMENTS
from utils.record.store import Record, RecordError, recorded

__all__ = ["EXPERIMENTS", "Record", "RecordError", "recorded"]
