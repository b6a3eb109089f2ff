"""Predicted and simulated against published: what was said beside what was measured."""

from evidence.validation.comparison import Comparison, Summary, summarize
from evidence.validation.report import compare_all, validate
from evidence.validation.tables import source, table

__all__ = ["Comparison", "Summary", "compare_all", "source", "summarize", "table", "validate"]
