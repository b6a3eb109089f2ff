"""Two ranks that share one device by gloo: the same losses as one process, and what it costs.

A functional check for a machine with one GPU, where NCCL refuses two ranks. It says nothing about
the speed of data parallelism: both ranks take turns on the same processor.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evidence.record.experiment import Experiment, Stage, Trial, measured_row
from evidence.record.store import Row
from utils.memory import measure
from utils.models import small_resnet
from utils.ranks import run_ranks, traffic
from utils.techniques.precision import tf32

RANKS = 2
BATCH = 64  # images of all ranks together
STEPS = 20
RATE = 1e-3  # so low that rounding does not grow from step to step
TIMED_STEPS = 5
TIMEOUT_SECONDS = 300.0


class ShareOfTheBatch:
    """One rank's training: `step()` is one step on its part of a fixed batch."""

    def __init__(self, device: torch.device) -> None:
        # A group of its own: where there are several GPUs, the default one would take NCCL.
        # Every rank is in it: none gets the number that stands for "not a member".
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        torch.manual_seed(0)
        images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
        mine = slice(dist.get_rank(), BATCH, dist.get_world_size())
        self._images, self._labels = images[mine].to(device), labels[mine].to(device)
        self.model: nn.Module = small_resnet().to(device)
        if dist.get_world_size() > 1:
            self.model = DistributedDataParallel(self.model, process_group=self._group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)

    def step(self) -> Tensor:
        """Train once; the loss of this rank's part."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self._images), self._labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def mean_over_ranks(self, losses: list[Tensor]) -> list[float]:
        """The losses of the whole batch."""
        total = torch.stack(losses)
        dist.all_reduce(total, group=self._group)
        return (total / dist.get_world_size()).tolist()


def train(device: torch.device) -> tuple[list[float], int, Row]:
    """On every rank: the losses of the whole batch, a step's gradient bytes, and its measurement."""
    with tf32(False):  # so that losses may be compared
        training = ShareOfTheBatch(device)
        losses = training.mean_over_ranks([training.step() for _ in range(STEPS)])
        with traffic() as sent:
            training.step()
        found = measure(
            training.step,
            model=training.model,
            optimizer=training.optimizer,
            items=BATCH,
            unit="images",
            timed_steps=TIMED_STEPS,
        )
    reduced = sum(r.payload_bytes for r in sent.rows if r.collective == "all-reduce")
    return losses, reduced, measured_row(found)


def trials(device: torch.device) -> list[Trial]:
    """One row: two ranks on the device, beside one process."""
    settings = {
        "quantity": "ranks on one device",
        "ranks": RANKS,
        "backend": "gloo",
        "images_per_step": BATCH,
        "steps": STEPS,
    }
    return [Trial(settings, partial(_compared, device))]


def _compared(device: torch.device, stage: Stage) -> Row:
    stage.name = "one process"
    ((alone, _, alone_row),) = run_ranks(
        train, 1, device, timeout_seconds=TIMEOUT_SECONDS, share_gpus=True
    )
    stage.name = "two ranks"
    (losses, reduced, row), *_ = run_ranks(
        train, RANKS, device, timeout_seconds=TIMEOUT_SECONDS, share_gpus=True
    )
    pairs = zip(losses, alone, strict=True)
    return row | {
        "largest_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "all_reduced_bytes": reduced,
        "one_process_peak_bytes": alone_row["peak_bytes"],
        "one_process_median_step_seconds": alone_row["median_step_seconds"],
        "losses": losses,
        "one_process_losses": alone,
    }


EXPERIMENT = Experiment(
    name="gloo_ranks",
    summary="two ranks on one device by gloo: losses, peak and gradient bytes beside one process",
    configuration={
        "model": "small ResNet with group norm, 308,650 parameters",
        "optimizer": f"SGD, lr {RATE}, momentum 0.9",
        "data": f"one batch of {BATCH} random normal images of 32 x 32, shared by the ranks",
        "precision": "fp32, without TF32",
        "steps": f"{STEPS} for the losses; then warm-up, 1 metered, {TIMED_STEPS} timed",
    },
    trials=trials,
)
