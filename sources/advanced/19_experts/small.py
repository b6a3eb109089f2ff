"""Small tools of lesson 19: what a layer keeps, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that stay from forward to backward of `layer`, but for its parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(x)
    size = sum(size for place, size in kept.items() if place not in own)
    out.sum().backward()
    return size


def forward_flops(layer: nn.Module, x: Tensor) -> int:
    """Floating-point operations of one forward, of its matrix products."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops()


def adam_bytes(layer: nn.Module, step: Callable[[], Any]) -> int:
    """Bytes of parameters, gradients and AdamW's two moments after `step` and an update."""
    optimizer = torch.optim.AdamW(layer.parameters())
    step()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return sum(t.numel() * t.element_size() for t in [*layer.parameters(), *gradients, *states])
