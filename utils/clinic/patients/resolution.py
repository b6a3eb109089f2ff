"""A diffusion U-Net that was trained on images of 128 x 128 and now gets 256 x 256.

"The batch is one image. I cannot make it smaller."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import UNet
from utils.units import MIB

BUDGET_BYTES = 128 * MIB
SIDE = 256
STEPS = 2


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    # Deep: what blocks keep must outweigh what some CPUs' convolutions take in between.
    model = UNet((8, 16, 16), blocks_per_level=3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1, side: int = SIDE
) -> list[float]:
    """The loss of each step; one image cannot be divided into parts."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        image = torch.randn(1, 3, side, side, generator=generator)
        noise = torch.randn(1, 3, side, side, generator=generator)
        optimizer.zero_grad()
        losses.append(0.0)
        for part, wanted in zip((image + noise).chunk(parts), noise.chunk(parts), strict=True):
            loss = F.mse_loss(model(part, torch.tensor([500])), wanted) / len(image.chunk(parts))
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


if __name__ == "__main__":
    print(train(*build()))
