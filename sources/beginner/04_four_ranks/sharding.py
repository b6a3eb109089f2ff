"""Each rank's share of a data set, and what to do with numbers that do not divide."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from utils.checked import check_public

__all__ = ["sharded_loader"]


def sharded_loader(
    dataset: Dataset, batch: int, *, seed: int = 0, drop_last: bool = False, **options: Any
) -> DataLoader:
    """A loader of this rank's share: together the ranks see `batch` items a step.

    The order is drawn from `seed` and the epoch, the same on all ranks and for any number of them:
    step k of N ranks holds the same items as step k of one. Call
    `loader.sampler.set_epoch(epoch)`, or every epoch has the first one's order.

    Where the items do not divide over the ranks, DistributedSampler pads: it takes items from the
    start of the order again, so that all ranks take as many steps. Those items count twice. With
    `drop_last` it leaves items out instead, and a short last batch is left out too: a mean over
    ranks then weighs every item the same.

    Args:
        dataset: as for DataLoader, with a length.
        batch: items of all ranks in a step.
        seed: of the order.
        drop_last: leave out what fills no whole batch on all ranks.
        options: more arguments of DataLoader.

    Raises:
        ValueError: the batch does not divide over the ranks, or the data set is too small.
    """
    unknown = sorted(set(options) - set(inspect.signature(DataLoader).parameters))
    if unknown:
        raise ValueError(f"options has {unknown[0]!r}, and DataLoader takes no such argument.")
    rank, ranks = _place()
    items = len(dataset)  # type: ignore[arg-type]
    if items < ranks:
        raise ValueError(
            f"{items} items cannot be shared by {ranks} ranks: some would have none of their own. "
            f"Take {ranks} items or more, or at most {max(items, 1)} ranks."
        )
    _check_batch(batch, ranks)
    if drop_last and items < batch:
        raise ValueError(
            f"{items} items fill no batch of {batch}, and drop_last leaves short ones out. "
            f"Choose a batch of at most {items // ranks * ranks}."
        )
    sampler = DistributedSampler(dataset, ranks, rank, seed=seed, drop_last=drop_last)
    return DataLoader(dataset, batch // ranks, sampler=sampler, drop_last=drop_last, **options)


def _place() -> tuple[int, int]:
    """Rank and number of ranks; one process alone is rank 0 of 1."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _check_batch(batch: int, ranks: int) -> None:
    if batch < 1:
        raise ValueError(f"The batch is {batch}; it needs {ranks} items or more for {ranks} ranks.")
    if batch % ranks:
        below, above = batch // ranks * ranks, (batch // ranks + 1) * ranks
        choices = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"A batch of {batch} does not divide over {ranks} ranks: choose {choices}. Unequal "
            "parts would weigh unequally in the mean over ranks."
        )


check_public(globals())
