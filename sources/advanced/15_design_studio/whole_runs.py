"""Whole published runs, their GPU hours scaled to another model and number of tokens by 6ND."""

from __future__ import annotations

from typing import NamedTuple

from evidence.validation import table

__all__ = ["WholeRun", "whole_runs"]

A100_FLOPS = 312e12
# As each source gives it; OPT-175B saw its 180 billion tokens more than once.
TOKENS = {"LLaMA-65B": 1.4e12, "OPT-175B": 300e9, "BLOOM-176B": 366e9}


class WholeRun(NamedTuple):
    """One run from its first step to its last.

    Attributes:
        name: Whose.
        parameters, tokens: N and D.
        gpu_hours: Published, of A100.
    """

    name: str
    parameters: float
    tokens: float
    gpu_hours: float

    def scaled_hours(self, parameters: float, tokens: float) -> float:
        """GPU hours of another run at the same speed: they grow with 6ND."""
        return self.gpu_hours * parameters * tokens / (self.parameters * self.tokens)

    @property
    def mfu(self) -> float:
        """6ND over what the GPUs' data sheet allows in those hours: restarts included."""
        return 6 * self.parameters * self.tokens / (self.gpu_hours * 3600 * A100_FLOPS)


def whole_runs() -> list[WholeRun]:
    """Runs of 65B to 176B parameters on A100, the shortest hours first."""
    rows = {row["model"]: row for row in table("gpu_hours")}
    runs = [
        WholeRun(name, 1e9 * float(rows[name]["params_b"]), tokens, float(rows[name]["gpu_hours"]))
        for name, tokens in TOKENS.items()
    ]
    # Zeng et al. 2022 (arXiv:2210.02414): 400 billion tokens on 96 nodes of 8 A100-40GB for 60 days.
    runs.append(WholeRun("GLM-130B", 130e9, 400e9, 96 * 8 * 60 * 24))
    return sorted(runs, key=lambda run: run.scaled_hours(1.0, 1.0))
