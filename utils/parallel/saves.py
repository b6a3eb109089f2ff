"""What a job that was killed goes on from: all states, saved by all ranks at once.

Entries are DTensors under names that all ranks share, so that `torch.distributed.checkpoint` writes
each shard once and other numbers of ranks can read them. They are saved safely: a job that is killed in
the middle, or whose last save goes bad on its disk, goes on from the one before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.parallel.checkpoint_folder import newest_whole, step_of
from utils.parallel.safe_checkpoint import any_saved, load_newest, save_safely

STOPPED = 75  # exit code of a job that saved and wants to go on: EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)  # what schedulers send before they take a node away
_asked: list[int] = []  # signals that came; handlers can do no more than note them


def note_signals() -> None:
    """From now on, SIGUSR1 and SIGTERM ask for a save and an end after the step that runs."""
    for number in SIGNALS:
        signal.signal(number, lambda came, frame: _asked.append(came))


class Saves:
    """The saves of one run, in a folder that all ranks see.

    Attributes:
        first: the step to begin with: 0, or the one after the last whole save, which is loaded.
    """

    def __init__(
        self,
        folder: str | None,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        every: int = 0,
    ) -> None:
        """Load the last whole save, if anything was saved.

        Args:
            folder: where saves lie; None saves nothing.
            parts: this rank's, materialised.
            optimizer: AdamW over their parameters.
            every: steps between saves; 0 saves only when a signal asks for it.

        Raises:
            CheckpointError: there are saves, and none is whole or of this model.
        """
        self._folder, self._every = Path(folder) if folder else None, every
        self._parts, self.optimizer = parts, optimizer
        self.first = 0
        if self._folder and any_saved(self._folder):
            self.first = load_newest(self._states(), self._folder)

    def kept(self, losses: Iterable[float]) -> Iterator[float]:
        """The losses as they come, with saves in between.

        Raises:
            SystemExit: with code 75, after a save that a signal asked for.
        """
        for step, loss in enumerate(losses, start=self.first + 1):
            yield loss
            if self._folder is None:
                continue
            ends = _any_rank(bool(_asked))
            if ends or (self._every and step % self._every == 0):
                save_safely(self._states(), self._folder, step)
            if ends:
                raise SystemExit(STOPPED)

    def _states(self) -> dict[str, Tensor]:
        """Parameters, moments and counts by name; the moments are made where there are none yet."""
        found: dict[str, Tensor] = {}
        for part in self._parts:
            for name, parameter in part.named_parameters():
                state = self.optimizer.state[parameter]
                if not state:
                    zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    state |= {"step": torch.zeros((), device=parameter.device), **zeros}
                found[f"parameters.{name}"] = parameter.detach()
                found |= {f"{key}.{name}": value for key, value in state.items()}
        return found


def saved_steps(folder: Path) -> int:
    """How many steps the last whole save holds; 0 where there is none."""
    found = newest_whole(folder)
    return step_of(found) if found else 0


def _any_rank(asked: bool) -> bool:
    """Whether a signal came to any rank: all must save after the same step."""
    count = torch.tensor(int(asked))
    dist.all_reduce(count)
    return bool(count.item())
