"""Recorded training runs for lab 03: healthy or with one fault, in fp16 and as an fp32 twin."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.techniques.numerics_recorder import NumericsRecorder, StepRecord

Loss = Callable[[Tensor, Tensor], Tensor]
FAULTS = ("no unscale", "norm in fp16", "loss overflows", "learning rate", "NaN in the data")
STEPS, ROWS = 16, 32
_ORDER = {"A": 3, "B": 0, "C": 4, "D": 2, "E": 1}  # which run has which of FAULTS


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _model() -> nn.Module:
    torch.manual_seed(3)
    layers = {
        "embed": nn.Linear(16, 32),
        "norm": _Norm(32),
        "up": nn.Linear(32, 64),
        "act": nn.GELU(),
        "down": nn.Linear(64, 6),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def _data(spoil: tuple[int, int] | None, value: float, units: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = units * torch.randn(STEPS, ROWS, 16, generator=generator)
    labels = (x @ torch.randn(16, 6, generator=generator)).argmax(-1)
    if spoil:
        x[spoil[0], spoil[1], 7] = value
    return x, labels


def _naive_loss(logits: Tensor, labels: Tensor) -> Tensor:
    e = (30 * logits).exp()
    return -(e.gather(1, labels[:, None]) / e.sum(-1, keepdim=True)).log().mean()


def run(
    dtype: torch.dtype = torch.float16,
    *,
    init_scale: float = 2.0**14,
    lr: float = 0.1,
    clip: float | None = None,
    unscale: bool = True,
    units: float = 1.0,
    spoil: tuple[int, int] | None = None,
    value: float = math.nan,
    loss: Loss = F.cross_entropy,
) -> list[StepRecord]:
    """Train a small network for 16 steps and return its records; fp16 runs use a scaler.

    Args:
        dtype: torch.float32 trains without autocast and scaler.
        init_scale: of the scaler.
        lr: of SGD with momentum.
        clip: largest norm of the gradients.
        unscale: before clipping.
        units: the inputs are multiplied by it.
        spoil: step and row of an input that is spoiled.
        value: that stands there.
        loss: of logits and labels.
    """
    low = dtype != torch.float32
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=low)
    with NumericsRecorder(model, optimizer, scaler) as recorder:
        for x, labels in zip(*_data(spoil, value, units), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype if low else torch.float16, enabled=low):
                found = loss(model(x), labels)
            scaler.scale(found).backward()
            if clip:
                if unscale:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            recorder.record(found)
    return recorder.records


def spoiled_run(step: int = 9, row: int = 13, init_scale: float = 2.0**22) -> list[StepRecord]:
    """A run in fp16 whose data hold one NaN, after a scale that starts too large."""
    return run(spoil=(step, row), init_scale=init_scale)


def mystery_runs() -> dict[str, dict[str, list[StepRecord]]]:
    """Five runs, "A" to "E", each with another fault: its records in fp16 and in fp32."""
    faults = {
        "no unscale": {"clip": 0.5, "unscale": False},
        "norm in fp16": {"units": 1500.0},
        "loss overflows": {"loss": _naive_loss, "lr": 0.001},
        "learning rate": {"lr": 20.0},
        "NaN in the data": {"spoil": (6, 21)},
    }
    return {
        name: {
            "fp16": run(**faults[FAULTS[place]]),
            "fp32": run(torch.float32, **faults[FAULTS[place]]),
        }
        for name, place in _ORDER.items()
    }


def fault_of(name: str) -> str:
    """The planted fault of a mystery run."""
    return FAULTS[_ORDER[name]]
