"""The batch of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from utils.rules import divides, keep_whole


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
        keep_whole(self, "Batch", "sequences", "sequence_length")

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.sequence_length

    def micro_batches(self, replicas: int, size: int) -> int:
        """Micro-batches of so many sequences that one replica passes through, m.

        Raises:
            ValueError: the batch does not divide into them.
        """
        share = replicas * size
        if share > self.sequences:
            raise ValueError(
                f"micro_batch {size} on {replicas} replicas needs {share} sequences, and the batch "
                f"has {self.sequences}. Largest micro_batch here: "
                f"{self.sequences // replicas or 'none, lower dp'}."
            )
        divides("dp * micro_batch", share, "sequences of the batch", self.sequences)
        return self.sequences // share
