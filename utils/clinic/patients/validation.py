"""A language model that is trained on small batches and validated on larger ones.

"Training is fine for the whole epoch. It dies in model.eval()."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.units import MIB

BUDGET_BYTES = 40 * MIB
CONFIG = TransformerConfig(vocabulary=256, hidden=128, layers=4, heads=4, feedforward=352)
STEPS = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next tokens."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1) -> list[float]:
    """The loss of each step, and of the validation."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(0, CONFIG.vocabulary, (4, 65), generator=generator)
        optimizer.zero_grad()
        losses.append(0.0)
        for tokens in batch.chunk(parts):
            loss = loss_of(model, tokens) * len(tokens) / len(batch)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    model.eval()
    held_out = torch.randint(0, CONFIG.vocabulary, (32, 65), generator=generator)
    losses.append(loss_of(model, held_out).item())
    return losses


if __name__ == "__main__":
    print(train(*build()))
