"""Seconds of one pass by what takes them, and of the passes of a block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one pass.

    Attributes:
        matmul: Matrix products, attention's included.
        memory: Kernels that only move data.
        communication: Tensor- and context-parallel collectives, which nothing hides.
    """

    matmul: float = 0.0
    memory: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """All of it, one after another."""
        return self.matmul + self.memory + self.communication

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            self.matmul + other.matmul,
            self.memory + other.memory,
            self.communication + other.communication,
        )

    def times(self, factor: float) -> PassSeconds:
        """Every part, so many times."""
        return PassSeconds(factor * self.matmul, factor * self.memory, factor * self.communication)


@dataclass(frozen=True)
class BlockTime:
    """A block, a head or a stage: one micro-batch, one rank.

    Attributes:
        forward, backward: The passes; the backward one without recomputation.
        recompute: What backward computes again first, by the plan.
    """

    forward: PassSeconds
    backward: PassSeconds
    recompute: PassSeconds = PassSeconds()

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.forward.total + self.backward.total + self.recompute.total

    def __add__(self, other: BlockTime) -> BlockTime:
        return BlockTime(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
        )

    def times(self, factor: float) -> BlockTime:
        """All three, so many times."""
        parts = self.forward, self.backward, self.recompute
        return BlockTime(*(part.times(factor) for part in parts))
