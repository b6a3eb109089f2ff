"""Each part of a model steps just before its next forward: nothing computes with an older weight."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from utils import Transformer

from .by_libraries import SMALL, batches, whole_loss

__all__ = ["clipped_losses", "step_before_use"]


def step_before_use(model: nn.Module, due: set[nn.Module], **settings: Any) -> None:
    """Before its forward each part that is due makes its AdamW's step. Fill `due` after backward."""

    def step(adam: torch.optim.Optimizer, part: nn.Module, inputs: Any) -> None:
        if part in due:
            due.remove(part)
            adam.step()
            adam.zero_grad()

    for part in model.modules():
        if own := list(part.parameters(recurse=False)):
            part.register_forward_pre_hook(partial(step, torch.optim.AdamW(own, **settings)))


def clipped_losses(*, late: bool) -> list[float]:
    """Of the lesson's batches, gradients clipped together; `late`: by `step_before_use`."""
    torch.manual_seed(0)
    model, due, found = Transformer(SMALL), set[nn.Module](), []
    if late:
        step_before_use(model, due, lr=1e-3)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches():
        loss = whole_loss(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(loss.item())
        if late:
            due.update(model.modules())
        else:
            adam.step()
            adam.zero_grad()
    return found
