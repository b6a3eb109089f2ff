"""What a way of training did: losses, accuracy, peak and payload of each rank, and tables of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from utils.data import cifar10, normalize
from utils.memory import measure
from utils.techniques import tf32
from utils.traffic.counter import Sent, traffic
from utils.units import format_bytes, format_seconds

from .machine import my_device, seconds_now

__all__ = [
    "Report",
    "largest_difference",
    "observe",
    "pictures",
    "script_text",
    "smooth",
    "table_of",
]

Step = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


class Report(NamedTuple):
    """One rank of a run: the mean loss of all ranks at each step, and what was measured after them.

    `right` is the share of held-out pictures, `step_seconds` the median, `sent` of one more step.
    """

    losses: list[float]
    right: float
    step_seconds: float
    peak_bytes: int
    at_start: Sent
    sent: Sent


def pictures(train: int, held_out: int) -> tuple[TensorDataset, Pair, str]:
    """CIFAR-10 at half its size: the first of each part, fp32 (n, 3, 16, 16); and its origin."""
    seen, unseen = cifar10("train"), cifar10("test")
    halves = [
        (F.avg_pool2d(normalize(part.images[:count]), 2), part.labels[:count].clone())
        for part, count in ((seen, train), (unseen, held_out))
    ]
    return TensorDataset(*halves[0]), halves[1], seen.source


def observe(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    loader: DataLoader,
    held_out: Pair,
    *,
    steps: int,
    dtype: torch.dtype,
    at_start: Sent,
) -> Report:
    """Take steps, then judge the model, and measure one more step twice: its memory, its sends."""
    with tf32(False):  # on a GPU, too, all digits of fp32
        losses, seconds = _run(step, loader, dtype, steps)
        right = _share_right(getattr(model, "module", model), held_out, dtype)
        batch = _on(my_device(), dtype, next(iter(loader)))
        memory = measure(
            lambda: step(*batch), model=model, optimizer=optimizer, unit="images", timed_steps=0
        )
        with traffic() as sent:
            step(*batch)
    return Report(losses, right, seconds, memory.peak_bytes, at_start, sent)


def _run(
    step: Step, loader: DataLoader, dtype: torch.dtype, steps: int
) -> tuple[list[float], float]:
    """Losses of all ranks together, and the median seconds of a step."""
    losses, seconds = [], []
    for batch in itertools.islice(_endless(loader), steps):
        start = seconds_now()
        loss = step(*_on(my_device(), dtype, batch))
        seconds.append(seconds_now() - start)
        dist.all_reduce(loss)  # for the curve alone
        losses.append(loss.item() / dist.get_world_size())
    return losses, sorted(seconds)[steps // 2]


def _endless(loader: DataLoader) -> Iterator[Sequence[Tensor]]:
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # another order in each
        yield from loader


def _on(device: torch.device, dtype: torch.dtype, batch: Sequence[Tensor]) -> Pair:
    return batch[0].to(device, dtype), batch[1].to(device)


@torch.no_grad()
def _share_right(model: nn.Module, held_out: Pair, dtype: torch.dtype) -> float:
    """Each rank judges its own pictures, none twice; the sum is everyone's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, labels = _on(my_device(), dtype, [part[rank::ranks] for part in held_out])
    right = (model(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(held_out[0])


def largest_difference(
    losses: Sequence[float], reference: Sequence[float], steps: int = 8
) -> float:
    """Of the first steps, the largest difference over the reference's loss."""
    pairs = zip(losses[:steps], reference[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def script_text() -> str:
    """The script of the lesson's scenarios, for `torchrun`."""
    return Path(__file__).with_name("train.py").read_text(encoding="utf-8")


def smooth(losses: Sequence[float], width: int = 16) -> list[float]:
    """Means over `width` steps, one for each place of that window."""
    return [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]


def table_of(ways: Mapping[str, Sequence[Report]]) -> pd.DataFrame:
    """A row a way: the largest peak and step of its ranks, and what rank 0 puts in."""
    rows = [_row(name, reports) for name, reports in ways.items()]
    return pd.DataFrame(rows).set_index("way")


def _row(name: str, reports: Sequence[Report]) -> dict[str, str | int]:
    first, alone = reports[0], len(reports) == 1
    return {
        "way": name,
        "peak of a rank": format_bytes(max(report.peak_bytes for report in reports)),
        "payload at the start": "-" if alone else format_bytes(first.at_start.payload_bytes),
        "payload a step": "-" if alone else format_bytes(first.sent.payload_bytes),
        "calls a step": 0 if alone else sum(row.calls for row in first.sent.rows),
        "median step": format_seconds(max(report.step_seconds for report in reports)),
    }
