"""The figure under lesson 01's slider: a step's peak by formula beside the measured one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from utils.memory import measure
from utils.models import resnet
from utils.units import Category, format_bytes
from utils.views import compare, predicted

from .ledger import ledger

Optimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
# Bytes of state that each keeps for a parameter, and what makes it.
OPTIMIZERS: dict[str, tuple[int, Optimizer]] = {
    "SGD": (0, lambda p: torch.optim.SGD(p, lr=0.1)),
    "SGD, momentum": (4, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Adam, one by one": (8, lambda p: torch.optim.Adam(p, foreach=False)),
}


def predicted_beside_measured(
    batch_size: int, model: str, optimizer: str, *, device: torch.device
) -> tuple[Figure, str]:
    """Bars of one step of a ResNet, and what they show: formula and ledger, then the meter.

    Args:
        batch_size: images of a step.
        model: "ResNet-18" or "ResNet-50".
        optimizer: a name of `OPTIMIZERS`.
        device: where the step runs.
    """
    network = resnet(18 if model == "ResNet-18" else 50, stem="cifar").to(device)
    state_bytes, make = OPTIMIZERS[optimizer]
    count = sum(p.numel() for p in network.parameters())
    one_image = ledger(network, torch.randn(2, 3, 32, 32, device=device)) / 2
    formula = {
        "parameters": 4 * count,
        "gradients": 4 * count,
        "optimizer state": state_bytes * count,
        "activations": one_image * batch_size,
    }
    chosen = make(network.parameters())
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (batch_size,), device=device)

    def step() -> None:
        chosen.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        chosen.step()

    run = measure(step, model=network, optimizer=chosen, items=batch_size, timed_steps=0)
    title = f"{model}, batch {batch_size}, {optimizer}: at the peak"
    bars = [predicted("the formulas", formula), replace(run, name="the meter")]
    both = compare(bars, title=title)
    axes = both.figure.axes[0]
    borrowed = format_bytes(run.breakdown[Category.TEMPORARIES])  # too narrow for its number
    axes.set_xlabel(f"{axes.get_xlabel()}; the meter's temporaries: {borrowed}")
    return both.figure, both.alt
