"""Everything that a run needs to go on as if nothing had happened, to the last bit.

Weights and moments are not enough. The learning rate's schedule, the loss scale, the place in the
data and the random state of every rank belong to the state of a run as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from utils.techniques.safe_checkpoint import load_newest, save_safely

# Older checkpoints hold numpy's random state as an array; these make one, and nothing else.
_NUMPY = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), np.empty(0).__reduce__()[0]]


class Batches:
    """Batches of epoch after epoch, without end, from a loader that knows its place.

    Args:
        loader: torchdata's `StatefulDataLoader`, over a sampler with `set_epoch`, such as its
            `StatefulDistributedSampler`. Each epoch has an order of its own.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.epoch = loader, 0
        self._current: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            if self._current is None:
                self.loader.sampler.set_epoch(self.epoch)
                self._current = iter(self.loader)
            for batch in self._current:
                return batch
            self.epoch, self._current = self.epoch + 1, None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the loader's place in it."""
        return {"epoch": self.epoch, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place; the loader's workers start at once, as they draw from the random state."""
        self.epoch = state["epoch"]
        self.loader.sampler.set_epoch(self.epoch)
        self.loader.load_state_dict(state["loader"])
        self._current = iter(self.loader)


def random_state() -> dict[str, Any]:
    """This process's random states: Python's, numpy's, torch's, and each GPU's; plain data."""
    kind, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave."""
    random.setstate(state["python"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


class RunState:
    """The whole state of a run on this rank; what is not used is left out.

    Args:
        model: sharded or not.
        optimizer: over its parameters.
        schedule: of the learning rate.
        scaler: of the loss.
        batches: where the data stands, such as `Batches`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        batches: Batches | None = None,
    ) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        shared = {"schedule": schedule, "scaler": scaler}
        self._shared = {name: part for name, part in shared.items() if part is not None}

    def pieces(self) -> dict[str, Any]:
        """What all ranks share, and what this rank keeps for itself, for `save_safely`."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own: dict[str, Any] = {"random": random_state()}
        if self.batches is not None:
            own["batches"] = self.batches.state_dict()
        shared = {name: part.state_dict() for name, part in self._shared.items()}
        return {"model": model, "optimizer": optimizer, **shared, _own_name(): own}

    def save(self, folder: Path, step: int, keep: int = 2) -> Path:
        """Save all of it safely; see `save_safely` for arguments and errors."""
        return save_safely(self.pieces(), folder, step, keep)

    def load(self, folder: Path, exact: bool = True) -> int:
        """Go on from the newest whole checkpoint; its step.

        Args:
            folder: that `save` wrote to.
            exact: False also takes a checkpoint of another number of ranks: weights, moments,
                schedule and scale go on; data and random states begin anew.

        Raises:
            CheckpointError: none is whole, it is of another model, or of another number of ranks.
        """
        pieces = self.pieces()
        if not exact:
            del pieces[_own_name()]
        with torch.serialization.safe_globals(_NUMPY):
            step = load_newest(pieces, folder, _ranks() if exact else None)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=pieces["model"], optim_state_dict=pieces["optimizer"],
        )  # fmt: skip
        for name, part in self._shared.items():
            part.load_state_dict(pieces[name])
        if exact:
            own = pieces[_own_name()]
            if self.batches is not None:
                self.batches.load_state_dict(own["batches"])
            set_random_state(own["random"])  # last: starting a loader draws from it
        return step


def _own_name() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
