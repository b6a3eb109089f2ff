"""A schedule of your own, run by PyTorch's pipelining: a program, given as CSV."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import PipelineStage

from utils.checked import check_public
from utils.parallel.actions import Program, check_program, stage_owners, write_csv
from utils.shims.torch_distributed import pipeline_from_csv

__all__ = ["OwnSchedule"]


@dataclass(frozen=True)
class OwnSchedule:
    """Runs a program; stands where PyTorch's class of a schedule stands.

    Attributes:
        rows: the actions of each rank.
    """

    rows: Program

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order in which data passes them."""
        return tuple(stage for stage, owner in stage_owners(self.rows).items() if owner == rank)

    def __call__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any],
        scale_grads: bool = True,
    ) -> Any:
        """PyTorch's schedule object, whose `step` runs one step.

        Args:
            stages: this rank's, in the order of `held`.
            n_microbatches: m.
            loss_fn: of a micro-batch's output and target.
            scale_grads: divide gradients by m, for losses that are means.

        Raises:
            ValueError: an action is missing, stands twice or does not exist.
            DeadlockError: the ranks would wait for each other for ever.
        """
        check_program(self.rows, n_microbatches)
        with tempfile.TemporaryDirectory() as folder:
            path = write_csv(self.rows, Path(folder) / "schedule.csv")
            return pipeline_from_csv(
                path,
                stages,
                n_microbatches=n_microbatches,
                loss_fn=loss_fn,
                scale_grads=scale_grads,
            )


check_public(globals())
