"""A language model whose batches hold texts of like length, cut to one length: some are long.

"It ran for hours, then it died."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.units import MIB

BUDGET_BYTES = 32 * MIB
CONFIG = TransformerConfig(vocabulary=256, hidden=64, layers=2, heads=4, feedforward=176)
ROWS = 8
LENGTHS = (96, 64, 128, 80, 160, 112, 512, 72, 128, 96)  # tokens of a text, by step


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1) -> list[float]:
    """The loss of each step; each batch goes through in `parts` parts."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for length in LENGTHS:
        batch = torch.randint(0, CONFIG.vocabulary, (ROWS, length + 1), generator=generator)
        optimizer.zero_grad()
        losses.append(0.0)
        for tokens in batch.chunk(parts):
            logits, wanted = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            loss = F.cross_entropy(logits, wanted, reduction="sum") / batch[:, 1:].numel()
            loss.backward()
            losses[-1] += loss.item()
            del logits, loss
        optimizer.step()
    return losses


if __name__ == "__main__":
    print(train(*build()))
