"""One plan in; the files that run it out."""

from utils.planner.exporters.bundle import Export, export

__all__ = ["Export", "export"]
