"""A language model whose gradients are accumulated over eight small batches.

"I accumulate, so that only one small batch is in memory. It takes as much as the large batch did."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.units import MIB

BUDGET_BYTES = 40 * MIB
CONFIG = TransformerConfig(vocabulary=256, hidden=128, layers=3, heads=4, feedforward=352)
STEPS, PARTS = 2, 8


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(PARTS):
            tokens = torch.randint(0, CONFIG.vocabulary, (4, 65), generator=generator)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            total = total + loss / PARTS
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses
