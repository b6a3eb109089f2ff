"""Embedding and head as one matrix, with a copy on the first stage and one on the last."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from utils.checked import check_public
from utils.models import Transformer

__all__ = ["add_up_ends"]


def add_up_ends(part: Transformer, mesh: DeviceMesh) -> Callable[[], None]:
    """Gives what to call after backward: both copies of the matrix get the sum of their gradients.

    Args:
        part: of the model, what this rank's stage has: `embed` on the first, `head` on the last.
        mesh: axes "pp", "shard", "tp". All ranks call this once, since it makes groups.
    """
    pipelines = mesh.mesh.flatten(
        1
    ).T  # a row for each pipeline: its ranks, from first stage to last
    ends, _ = dist.new_subgroups_by_enumeration(pipelines[:, [0, -1]].tolist())

    def after_backward() -> None:
        end: nn.Module | None = part.head if part.embed is None else part.embed
        if end is None:
            return  # a stage between the ends
        grad = end.weight.grad
        assert isinstance(ends, dist.ProcessGroup) and isinstance(grad, DTensor), "after backward"
        dist.all_reduce(grad.to_local(), group=ends)

    return after_backward


check_public(globals())
