"""The run whose record opens the lesson: fp16 with a scaler, and healthy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.checked import check_public
from utils.rules import whole
from utils.techniques import NumericsRecorder, StepRecord

from .network import CLASSES, FEATURES, network

ROWS, MOST_STEPS = 64, 1000


def healthy_run(steps: int) -> list[StepRecord]:
    """A record of so many steps, on the lesson's kind of data.

    Raises:
        ValueError: no number of steps from 1 to `MOST_STEPS`.
    """
    whole("healthy_run", most=MOST_STEPS, steps=steps)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, ROWS, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    model = network(nn.LayerNorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2 * steps)
    with NumericsRecorder(model, optimizer, scaler) as recorder:
        for x, y in zip(inputs, (inputs @ teacher).argmax(-1), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.record(loss)
    return recorder.records


__all__ = ["healthy_run"]

check_public(globals())
