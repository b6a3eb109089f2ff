"""A language model that is trained for eight steps and logs how large its logits are.

"It ran for an hour, then it died. The batch never changed."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.units import MIB

BUDGET_BYTES = 40 * MIB
CONFIG = TransformerConfig(vocabulary=2048, hidden=64, layers=2, heads=4, feedforward=176)
STEPS = 8


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1) -> list[float]:
    """The loss of each step, their mean, and the mean squared size of the logits."""
    generator = torch.Generator().manual_seed(1)
    losses, total_loss, total_size = [], torch.zeros(()), torch.zeros(())
    for _ in range(STEPS):
        batch = torch.randint(0, CONFIG.vocabulary, (8, 65), generator=generator)
        optimizer.zero_grad()
        losses.append(0.0)
        for tokens in batch.chunk(parts):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / parts
            loss.backward()
            total_loss = total_loss + loss
            total_size = total_size + logits.logsumexp(-1).square().mean() / parts
            losses[-1] += loss.item()
        optimizer.step()
    return [*losses, total_loss.item() / STEPS, total_size.item() / STEPS]


if __name__ == "__main__":
    print(train(*build()))
