"""What a way of training did on each rank: losses, gradients, memory, payload, and tables of them."""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
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
from utils.memory import Measurement, measure
from utils.ranks import run_ranks
from utils.techniques import tf32
from utils.traffic.counter import Sent, traffic
from utils.units import MIB, Category, Phase

from .machine import my_device

__all__ = [
    "Report",
    "gradient_difference",
    "judged_twice",
    "largest_difference",
    "observe",
    "pictures",
    "quarter_by_quarter",
    "run_script",
    "scaled_peak_bytes",
    "script_text",
    "table_of",
]

NAMES = {Category.COMMUNICATION: "DDP's buckets"}  # here nothing else communicates
Step = Callable[[Tensor, Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


class Report(NamedTuple):
    """One rank of a run.

    `losses` of a step are means over all ranks; `gradient` is the first step's, flat, after it was
    averaged; `buffers` is the sum of all buffers; `memory` of one more step; `sent` in the last.
    """

    losses: list[float]
    gradient: Tensor
    buffers: float
    memory: Measurement | None
    at_start: Sent
    sent: Sent


def pictures(count: int) -> tuple[TensorDataset, str]:
    """CIFAR-10 at half its size: its first training images, fp32 (n, 3, 16, 16); and its origin."""
    part = cifar10("train")
    halves = F.avg_pool2d(normalize(part.images[:count]), 2)
    return TensorDataset(halves, part.labels[:count].clone()), part.source


def observe(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    loader: DataLoader,
    *,
    steps: int,
    dtype: torch.dtype,
    at_start: Sent,
    metered: bool,
) -> Report:
    """Take steps, and meter one more if asked to."""
    with tf32(False):  # on a GPU, too, all digits of fp32
        losses, gradient, sent = _run(model, step, loader, dtype, steps)
        inner = getattr(model, "module", model)
        buffers = sum(buffer.double().sum().item() for buffer in inner.buffers())
        batch = _on(my_device(), dtype, next(iter(loader)))
        memory = _metered(lambda: step(*batch), model, optimizer) if metered else None
    return Report(losses, gradient, buffers, memory, at_start, sent)


def _run(
    model: nn.Module, step: Step, loader: DataLoader, dtype: torch.dtype, steps: int
) -> tuple[list[float], Tensor, Sent]:
    """Losses of all ranks together, the first step's gradient, and what the last one sends."""
    losses, gradient, sent = [], torch.empty(0), Sent()
    for number, batch in enumerate(itertools.islice(_endless(loader), steps), start=1):
        with traffic() if number == steps else contextlib.nullcontext(sent) as sent:
            loss = step(*_on(my_device(), dtype, batch))
        if number == 1:
            gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])  # type: ignore[union-attr]
        dist.all_reduce(loss)  # for the curve alone
        losses.append(loss.item() / dist.get_world_size())
    return losses, gradient, sent


def _metered(step: Callable[[], Tensor], model: nn.Module, optimizer: Optimizer) -> Measurement:
    """One warm-up step inside the recording: else it would not see old gradients go."""
    return measure(
        step, model=model, optimizer=optimizer, unit="images", warmup_steps=1, timed_steps=0
    )


def _endless(loader: DataLoader) -> Iterator[Sequence[Tensor]]:
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # another order in each
        yield from loader


def _on(device: torch.device, dtype: torch.dtype, batch: Sequence[Tensor]) -> Pair:
    return batch[0].to(device, dtype), batch[1].to(device)


def quarter_by_quarter(model: nn.Module) -> nn.Module:
    """The model, which from now on looks at four ranks' shares of a batch one by one."""
    whole = model.forward

    def forward(images: Tensor) -> Tensor:
        parts = [whole(images[rank::4]) for rank in range(4)]  # every fourth image
        return torch.stack(parts, dim=1).flatten(0, 1)  # back into the batch's order

    model.forward = forward  # type: ignore[method-assign]
    return model


def largest_difference(
    losses: Sequence[float], reference: Sequence[float], steps: int = 8
) -> float:
    """Of the first steps, the largest difference over the reference's loss."""
    pairs = zip(losses[:steps], reference[:steps], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def gradient_difference(found: Report, reference: Report) -> float:
    """The norm of the difference of the first gradients, over that of the reference's."""
    return float((found.gradient - reference.gradient).norm() / reference.gradient.norm())


def script_text() -> str:
    """The script of the lesson's scenarios, for `torchrun`."""
    return Path(__file__).with_name("train.py").read_text(encoding="utf-8")


def run_script(path: Path, ranks: int, *arguments: str) -> str:
    """Run a script on ranks as `torchrun` does, in processes that have torch already: what rank 0 prints."""
    return run_ranks(_as_torchrun_does, ranks, str(path), arguments, timeout_seconds=400)[0]


def judged_twice(printed: str) -> list[str]:
    """What the script printed of its model: judged by all ranks, and by one that loaded it.

    Raises:
        AssertionError: the two losses differ by more than rounding.
    """
    found = [line.partition("accuracy ")[2] for line in printed.splitlines() if "accuracy" in line]
    two, alone = (float(said.rpartition(" ")[2]) for said in found)
    assert abs(two - alone) < 1e-3 * alone, "what was saved is not what was judged"
    return found


def _as_torchrun_does(path: str, arguments: Sequence[str]) -> str:
    dist.destroy_process_group()  # the script makes its own
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def table_of(ways: Mapping[str, Report]) -> pd.DataFrame:
    """A row a way: rank 0's memory at its peak and where backward ends, in MiB, and its calls a step."""
    return pd.DataFrame([_row(name, report) for name, report in ways.items()]).set_index("way")


def scaled_peak_bytes(report: Report, rest_factor: float) -> float:
    """A rank's peak, if the bytes at it that have no name of their own were this many times as many."""
    assert report.memory is not None, "train(..., metered=True) meters a step"
    rest_bytes = _parts(report.memory)["rest"]
    return report.memory.peak_bytes + (rest_factor - 1) * rest_bytes


def _row(name: str, first: Report) -> dict[str, str | int]:
    assert first.memory is not None, "train(..., metered=True) meters a step"
    parts = {f"{category}": f"{size / MIB:.2f}" for category, size in _parts(first.memory).items()}
    return {
        "way": name,
        "peak, MiB": f"{first.memory.peak_bytes / MIB:.2f}",
        **parts,
        "where backward ends, MiB": f"{_where_backward_ends(first.memory) / MIB:.2f}",
        "calls a step": sum(row.calls for row in first.sent.rows),
    }


def _where_backward_ends(memory: Measurement) -> int:
    """Bytes alive when the optimizer begins."""
    timeline = memory.timeline
    begins = next(s.start_ns for s in timeline.spans if s.phase is Phase.OPTIMIZER_STEP)
    return timeline.at(begins).total_bytes


def _parts(memory: Measurement) -> dict[str, int]:
    """The categories at the peak; small ones are one."""
    shown = (
        Category.PARAMETERS,
        Category.GRADIENTS,
        Category.OPTIMIZER_STATE,
        Category.COMMUNICATION,
        Category.ACTIVATIONS,
    )
    found = {NAMES.get(category, str(category)): memory.breakdown[category] for category in shown}
    return found | {"rest": memory.peak_bytes - sum(found.values())}
