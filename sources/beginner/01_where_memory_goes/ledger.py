"""What the check of exercise 2 in lab 01 counts beside the learner: a ledger of saved tensors."""

from __future__ import annotations

import torch
from torch import nn


class SavesAView(nn.Module):
    """Saves a storage and a view of its half, a buffer, its own weights, and results that nothing
    but the graph keeps alive: a ledger whose graph is gone sees their addresses used again.
    """

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(32, 8)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(rows, 32) -> (rows, 8)."""
        x = torch.relu(self.first(inputs))[:, :32].sin()
        for _ in range(6):
            x = torch.tanh(x)
        return self.last(x * self.scale)


def ledger(
    model: nn.Module,
    inputs: torch.Tensor,
    own: list[torch.Tensor] | None = None,
    once: bool = True,
) -> int:
    """Bytes that forward makes and autograd keeps for backward.

    Args:
        model: Run forward once.
        inputs: What it takes.
        own: Tensors whose storages do not count; what stood there before forward if left out, the
            model's parameters and buffers and the inputs.
        once: Count a storage once, however many tensors view it.
    """
    owned = [*model.parameters(), *model.buffers(), inputs] if own is None else own
    mine = {tensor.untyped_storage().data_ptr() for tensor in owned}
    kept: list[tuple[int, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept.append((storage.data_ptr(), storage.nbytes()))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    total = sum(dict(kept).values()) if once else sum(size for _, size in kept)
    del output
    return total
