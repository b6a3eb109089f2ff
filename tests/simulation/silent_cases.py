"""Small programs that name CUDA, for simulations on machines without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from utils.simulation import simulate

A100 = "A100 80GB"


def peak(build: Any, step: Any, **how: Any) -> int:
    return simulate(build, step, device=A100, **how).peak_bytes


def linear(width: int = 1024) -> tuple[nn.Module, None]:
    return nn.Linear(width, width), None


def on_cuda(width: int = 1024) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(width, width).to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def infers() -> nn.Module:
    return nn.Linear(1024, 1024).to("cuda")


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
