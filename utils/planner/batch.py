"""The batch of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog.rules import keep_whole


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of one optimizer step, over all ranks.

    Attributes:
        sequences: Sequences in the global batch.
        sequence_length: Tokens in one sequence, s.
    """

    sequences: int
    sequence_length: int

    def __post_init__(self) -> None:
        """Raises ValueError where a count is no whole number, or below one."""
        keep_whole(self, "batch", "sequences", "sequence_length")

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.sequence_length
