"""DeepSpeed's start-up by ZeRO-2 with its optimizer offloaded: what it needs on the card, and where."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from utils.memory import host_memory

__all__ = ["start_up"]


@torch.no_grad()
def start_up(groups: Sequence[Sequence[nn.Parameter]], card_bytes: float) -> list[Tensor]:
    """fp32 masters on the host, group by group, made as DeepSpeed 0.19.8 does on one rank.

    A group's weights become one flat tensor: on the card where a copy has room, else by way of the
    host. That tensor is cloned, and the clone converted on the way to the host.

    Args:
        groups: the optimizer's parameter groups.
        card_bytes: of the card.
    """
    masters, held = [], sum(p.nbytes for group in groups for p in group)
    for group in groups:
        beside = held + sum(p.nbytes for p in group) <= card_bytes
        sizes = [p.numel() for p in group]  # before they leave
        flat = _flattened(group) if beside else _flattened_on_host(group)
        for p, part in zip(group, flat.split(sizes), strict=True):
            p.data = part
        clone = flat.clone()
        with host_memory():  # a copy that waits is converted by the CPU
            masters.append(clone.to(device="cpu", dtype=torch.float32))
        del clone
    return masters


def _flattened(group: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in group])


def _flattened_on_host(group: Sequence[nn.Parameter]) -> Tensor:
    """The card holds one copy at a time: its weights leave before the flat tensor comes."""
    device = group[0].device
    with host_memory():
        parts = [p.detach().to("cpu", copy=True).flatten() for p in group]
        flat = torch.cat(parts)
    for p in group:
        p.data = torch.empty(1, dtype=p.dtype, device=device)
    return flat.to(device)
