"""The run that lesson 16 resumes to the last bit: sharded, with dropout, a schedule, a scaler and noisy data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

ROWS, WIDTH, BATCH = 480, 16, 8


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Points with noise, from a generator of the row's and epoch's own or from the worker's global one."""

    def __init__(self, own_noise: bool = True) -> None:
        self.rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        self.own_noise, self.epoch = own_noise, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        seed = self.epoch * ROWS + index  # each epoch draws other noise, and a resumed one the same
        generator = torch.Generator().manual_seed(seed) if self.own_noise else None
        noisy = self.rows[index] + 0.3 * torch.randn(WIDTH, generator=generator)
        return noisy, int(self.rows[index, :8].sum() > 0)


class Run:
    """One rank's part of the run; all that it needs to go on is in its attributes.

    Attributes:
        model, optimizer, schedule, scaler: alike on all ranks, the first two in shards.
        loader: gives each rank a part of each epoch's order, by a worker, and knows its place.
        epoch: that comes next.
        batches: what is left of the epoch under way.
    """

    def __init__(self, own_noise: bool = True) -> None:
        torch.manual_seed(0)  # the same weights on all ranks
        layers = (nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 2))
        self.model: Any = fully_shard(nn.Sequential(*layers))
        torch.manual_seed(1 + dist.get_rank())  # and dropout of each rank's own
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _factor)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
        self.loader = _stateful_loader(Points(own_noise))
        self.epoch = 0
        self.batches: Iterator[Any] = iter(())

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch of this rank, of a new epoch where one is over."""
        for batch in self.batches:
            return batch
        self.begin(self.epoch)
        self.batches, self.epoch = iter(self.loader), self.epoch + 1
        return next(self.batches)

    def begin(self, epoch: int) -> None:
        """Tell the order and the noise of the data which epoch it is."""
        self.loader.sampler.set_epoch(epoch)
        self.loader.dataset.epoch = epoch

    def step(self) -> float:
        """One training step; the mean of all ranks' losses."""
        inputs, targets = self.next_batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(self.model(inputs).float(), targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)  # skips the step where a gradient is not finite
        self.scaler.update()
        self.schedule.step()
        return mean_of_ranks(loss)


def mean_of_ranks(loss: Tensor) -> float:
    """The mean over all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _factor(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.97**step


def _stateful_loader(data: Points) -> Any:
    sampler = StatefulDistributedSampler(data, shuffle=True, drop_last=True)
    return StatefulDataLoader(
        data,
        batch_size=BATCH,
        sampler=sampler,
        num_workers=1,
        drop_last=True,
        multiprocessing_context="fork",
    )
