"""A tower of wide layers, trained on a handful of rows at a time.

"I know about `foreach`. With `fused=True` it still dies, in the very first step."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.units import MIB

BUDGET_BYTES = 43 * MIB
LAYERS, WIDTH, STEPS = 12, 512, 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        rows = torch.randn(16, WIDTH, generator=generator)
        labels = torch.randint(0, 10, (16,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
