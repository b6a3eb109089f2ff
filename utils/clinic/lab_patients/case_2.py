"""An encoder of pairs: each text is to find its own image among all those of the batch.

"The encoders are tiny. A larger batch gives better features, so I doubled it, and doubled it again."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.units import MIB

BUDGET_BYTES = 34 * MIB
ROWS, WIDTH = 2304, 48
STEPS = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, WIDTH) for name in ("text", "image")})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def pair_loss(texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    scores = texts @ images.T / 0.07
    return F.cross_entropy(scores, torch.arange(len(texts)))


def train(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        words = torch.randn(ROWS, 64, generator=generator)
        pictures = words + torch.randn(ROWS, 64, generator=generator)
        optimizer.zero_grad()
        texts = F.normalize(model["text"](words), dim=1)
        images = F.normalize(model["image"](pictures), dim=1)
        loss = pair_loss(texts, images)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del texts, images, loss
    return losses
