"""A small student that learns from a larger teacher. Only the student is trained.

"The student alone fits four times. I put the teacher into eval mode, and it does not help."
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig
from utils.units import MIB

BUDGET_BYTES = 36 * MIB
STUDENT = TransformerConfig(vocabulary=256, hidden=64, layers=2, heads=4, feedforward=176)
TEACHER = TransformerConfig(vocabulary=256, hidden=128, layers=6, heads=4, feedforward=352)
STEPS = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"student": Transformer(STUDENT), "teacher": Transformer(TEACHER)})
    return model, torch.optim.AdamW(model["student"].parameters(), lr=1e-3)


def train(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    model["teacher"].eval()
    for _ in range(STEPS):
        tokens = torch.randint(0, 256, (8, 64), generator=generator)
        optimizer.zero_grad()
        wanted = model["teacher"](tokens).softmax(-1)
        found = model["student"](tokens).log_softmax(-1)
        loss = F.kl_div(found, wanted, reduction="batchmean") / tokens.shape[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
