"""A language model on data of which some batches are broken. Those are skipped.

"It skips the broken batches and goes on, as it should. After some of them it dies."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.units import MIB

BUDGET_BYTES = 34 * MIB
CONFIG = TransformerConfig(vocabulary=512, hidden=96, layers=3, heads=4, feedforward=256)
STEPS = 10


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def checked_loss(model: nn.Module, tokens: torch.Tensor, is_broken: bool) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if is_broken:
        raise FloatingPointError(f"the loss {loss.item():.2f} is out of range")
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses, skipped = [], []
    for step in range(STEPS):
        batch = torch.randint(0, CONFIG.vocabulary, (4, 65), generator=generator)
        optimizer.zero_grad()
        try:
            loss = checked_loss(model, batch, is_broken=step % 2 == 1)
        except FloatingPointError as error:
            skipped.append(error)
            continue
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{len(skipped)} batches skipped:", *skipped)
    return [*losses, float(len(skipped))]
