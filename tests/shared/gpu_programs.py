"""Programs that the meter, the simulator and CUDA's own allocator are asked about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from utils.models import Transformer, TransformerConfig, resnet
from utils.techniques import checkpoint_blocks

TINY = TransformerConfig(vocabulary=4096, hidden=512, layers=4, heads=8, feedforward=1408)
Program = tuple[Callable[[], tuple[nn.Module, Any]], Callable[[nn.Module, Any], Any]]


def transformer(every: int) -> Program:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = checkpoint_blocks(Transformer(TINY), every=every).to("cuda")
        return model, torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, optimizer: Any) -> float:
        tokens = torch.randint(4096, (4, 513), generator=torch.Generator().manual_seed(1)).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return build, step


def images() -> Program:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = resnet(18).to("cuda")
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        found = model(torch.randn(16, 3, 32, 32, device="cuda"))
        F.cross_entropy(found, torch.randint(10, (16,), device="cuda")).backward()
        optimizer.step()

    return build, step


PROGRAMS = {"plain": transformer(0), "checkpointed": transformer(1), "ResNet-18": images()}
