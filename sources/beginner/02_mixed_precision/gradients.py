"""The gradients that backward hands from layer to layer, for lesson 02's table of what fp16 loses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def at_convolutions(model: nn.Module, *, images: int, batch: int) -> Tensor:
    """Gradients at the outputs of all convolutions, in fp32 and in one row, without exact zeros.

    Args:
        model: run forward and backward once, on random images (images, 3, 32, 32) of ten classes.
        images: how many are computed.
        batch: the batch whose mean loss they stand for: each counts as one in so many.
    """
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _layer, _given, out: _note(out, found))
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d)
    ]
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(images, 3, 32, 32, generator=draw).to(device)
    labels = torch.randint(0, 10, (images,), generator=draw).to(device)
    try:
        (F.cross_entropy(model(inputs), labels, reduction="sum") / batch).backward()
    finally:
        for hook in hooks:
            hook.remove()
    row = torch.cat(found)
    return row[row != 0]


def _note(out: Any, found: list[Tensor]) -> None:
    out.register_hook(lambda gradient: found.append(gradient.detach().flatten()))
