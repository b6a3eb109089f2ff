"""Predicted and simulated against published: what was said beside what was measured."""

from utils.validation.comparison import Comparison, Summary, summarize
from utils.validation.report import compare_all, validate
from utils.validation.tables import source, table

__all__ = ["Comparison", "Summary", "compare_all", "source", "summarize", "table", "validate"]
