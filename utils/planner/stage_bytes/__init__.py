"""Bytes of a rank: what lasts, what comes and goes, and the moment when both are most."""

from utils.planner.stage_bytes.decide import kind_memories, memory, stage_memories

__all__ = ["kind_memories", "memory", "stage_memories"]
