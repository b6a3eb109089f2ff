"""ResNet-50 over batch sizes and precisions, and the largest batch that 16 GB hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from evidence.record.experiment import Experiment, Stage, Trial, free_memory, measured_row
from evidence.record.store import Row
from utils.memory import Budget, Measurement, budget, measure
from utils.memory.budgets import is_out_of_memory
from utils.models.resnets import resnet
from utils.techniques.precision import Precision, offered, tf32

CAP = "16GB"
CLASSES = 10
LOSS_SCALE = 2.0**10  # so low that no step overflows: a skipped update takes less memory
TIMED_STEPS = 5


@dataclass(frozen=True)
class Grid:
    """One image size: the stem that suits it, and the batch sizes to measure."""

    stem: str
    image_size: int
    batch_sizes: tuple[int, ...]


CUDA_GRIDS = (
    Grid("cifar", 32, (128, 512, 2048)),
    Grid("imagenet", 224, (32, 128, 256)),
)
CPU_GRIDS = (Grid("cifar", 32, (2, 4)),)


@dataclass(frozen=True)
class BatchSeries:
    """What stays the same while batch sizes change."""

    grid: Grid
    precision: Precision
    device: torch.device

    @property
    def settings(self) -> Row:
        return {
            "stem": self.grid.stem,
            "image_size": self.grid.image_size,
            "precision": self.precision.name,
        }


class TrainingStep:
    """A model, its optimizer and one batch; calling it is one training step."""

    def __init__(self, case: BatchSeries, batch: int, stage: Stage) -> None:
        torch.manual_seed(0)
        size, device = case.grid.image_size, case.device
        with device:
            self.model = resnet(depth=50, stem=case.grid.stem, num_classes=CLASSES)
            self._images = torch.randn(batch, 3, size, size)
            self._labels = torch.randint(CLASSES, (batch,))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._dtype, self._device_type, self._stage = case.precision.autocast, device.type, stage
        scaled = self._dtype is torch.float16
        self._scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, enabled=scaled)

    def __call__(self) -> None:
        mixed = self._dtype is not None
        self._stage.name = "forward"
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=mixed):
            loss = nn.functional.cross_entropy(self.model(self._images), self._labels)
        self._stage.name = "backward"
        self._scaler.scale(loss).backward()
        self._stage.name = "optimizer step"
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    def measure(self, *, timed_steps: int, within: Budget | None = None) -> Measurement:
        """The meter's view of this step."""
        return measure(
            self,
            model=self.model,
            optimizer=self.optimizer,
            items=len(self._images),
            unit="images",
            name=f"batch {len(self._images)}",
            timed_steps=timed_steps,
            within=within,
        )

    @property
    def steps_skipped(self) -> bool:
        """Whether a gradient overflowed, so that an update was left out."""
        return self._scaler.is_enabled() and self._scaler.get_scale() < LOSS_SCALE


def trials(device: torch.device) -> list[Trial]:
    """A row per image size, precision and batch; on CUDA also the largest batches under the cap."""
    on_gpu = device.type == "cuda"
    grids = CUDA_GRIDS if on_gpu else CPU_GRIDS
    cases = [
        BatchSeries(grid, precision, device) for grid in grids for precision in offered(device)
    ]
    steps = [_step_trial(case, batch) for case in cases for batch in case.grid.batch_sizes]
    limits = [_largest_trial(case) for case in cases if on_gpu]
    return steps + limits


def _step_trial(case: BatchSeries, batch: int) -> Trial:
    settings = {"quantity": "step", **case.settings, "batch": batch}
    return Trial(settings, partial(_step, case, batch))


def _largest_trial(case: BatchSeries) -> Trial:
    return Trial(
        {"quantity": "largest batch", **case.settings, "cap": CAP}, partial(_largest, case)
    )


def _step(case: BatchSeries, batch: int, stage: Stage, within: Budget | None = None) -> Row:
    with tf32(case.precision.tf32):
        step = TrainingStep(case, batch, stage)
        row = measured_row(step.measure(timed_steps=TIMED_STEPS, within=within))
    return row | {"steps_skipped": step.steps_skipped}


def _largest(case: BatchSeries, stage: Stage) -> Row:
    """The largest batch under the cap, to a quarter of the smallest one, and what it takes there."""
    tried: dict[int, bool] = {}

    def fits(batch: int) -> bool:
        tried[batch] = _fits(case, batch, stage)
        return tried[batch]

    start = case.grid.batch_sizes[0]
    batch = largest(fits, start, math.ceil(start / 4))
    row: Row = {"batch": batch, "tried": sorted(tried.items())}
    if batch:
        free_memory(case.device)
        row |= _step(case, batch, stage, within=budget(CAP))
    return row


def _fits(case: BatchSeries, batch: int, stage: Stage) -> bool:
    free_memory(case.device)  # blocks that the allocator kept would count towards the cap
    try:
        with tf32(case.precision.tf32):
            TrainingStep(case, batch, stage).measure(timed_steps=1, within=budget(CAP))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def largest(fits: Callable[[int], bool], start: int, step: int = 1) -> int:
    """The largest multiple of `step` that fits, by doubling from `start`, then halving the gap; 0 if none.

    Takes for granted that what is smaller than something that fits, fits.
    """
    low, high = 0, math.ceil(start / step)
    while fits(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


EXPERIMENT = Experiment(
    name="resnet50",
    summary="ResNet-50: memory and speed over batch sizes and precisions, largest batch in 16 GB",
    configuration={
        "model": "ResNet-50",
        "classes": CLASSES,
        "optimizer": "Adam, lr 1e-3, PyTorch's default implementation for the device",
        "data": "random normal images, on the device before the step",
        "memory_format": "contiguous (NCHW)",
        "cudnn_benchmark": False,
        "loss_scale": LOSS_SCALE,
        "steps": f"1 warm-up, 1 metered, {TIMED_STEPS} timed",
        "tf32": "both matmuls and convolutions; in all other rows neither",
    },
    trials=trials,
)
