"""A world of any size on one machine: process groups that hold no one, meshes without data.

PyTorch's `fake` process group answers every collective at once and moves nothing. Memory and
the sequence of operations of one rank do not depend on what the others send.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from utils.parallel.dims import ParallelDims
from utils.shims.ddp import modelled_reducer
from utils.shims.torch_distributed import (
    forget_shardings,
    join_alone,
    meshes_with_data,
    noted_column_splits,
)


@dataclass
class World:
    """What a simulation notes of its world: the mesh axis of each group, the modules split."""

    axes: dict[str, str] = field(default_factory=dict)
    split: dict[nn.Module, DeviceMesh] = field(default_factory=dict)

    def axis(self, group: Any) -> str:
        """The name of the mesh axis that a process group, or the group of a name, stands for."""
        name = group if isinstance(group, str) else group.group_name
        return self.axes.get(name, "world")

    def axes_of(self, mesh: dict[str, str]) -> None:
        """Take up the axes of a new mesh, by the names of their groups; the first name stays."""
        self.axes = mesh | self.axes


@contextlib.contextmanager
def simulated_world(ranks: int | ParallelDims, rank: int) -> Iterator[World]:
    """One rank of a world; the process group is destroyed at the end, come what may.

    Raises:
        ValueError: there can be no such rank, or a process group exists already.
    """
    size = ranks.ranks if isinstance(ranks, ParallelDims) else ranks
    _check(size, rank)
    world, excepthook = World(), sys.excepthook
    join_alone(rank, size)
    try:
        with (
            _environment(rank, size),
            meshes_with_data(world.axes_of, _check_sizes),
            noted_column_splits(world.split.__setitem__),
            modelled_reducer(),
        ):
            yield world
    finally:
        sys.excepthook = excepthook  # joining puts the rank's number before later tracebacks
        dist.destroy_process_group()
        if size > 1:  # one rank has shared nothing, and runs without the modules that would say so
            forget_shardings()


def check_model_heads(model: nn.Module, world: World) -> None:
    """Refuse attention whose heads do not come out whole when tensor parallelism splits them.

    Raises:
        ValueError: naming the layer, its number of heads and the number of ranks.
    """
    for path, module in model.named_modules():
        width = getattr(module, "head_dim", None)
        if not isinstance(width, int):
            continue
        for name, layer in module.named_children():
            ranks = world.split[layer].size() if layer in world.split else 1
            heads = getattr(layer, "out_features", 0) // width
            if heads % ranks:
                raise ValueError(
                    f"'{path}.{name}' has {heads} heads, and {heads} do not divide evenly over "
                    f"the {ranks} ranks of tensor parallelism. Split over a number of ranks that "
                    f"divides {heads}, or change the number of heads."
                )


def _check(size: int, rank: int) -> None:
    if size < 1:
        raise ValueError(f"world={size} has no ranks. Give the number of devices, 1 or more.")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside: a world of {size} has ranks 0 to {size - 1}.")
    if dist.is_initialized():
        raise ValueError(
            "This process already belongs to a process group, and a simulation brings its own. "
            "Call torch.distributed.destroy_process_group() first, and leave "
            "init_process_group() out of build()."
        )


def _environment(rank: int, size: int) -> contextlib.AbstractContextManager[Any]:
    """What torchrun sets, for code that looks there; each rank on a machine of its own."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in values.items()})


def _check_sizes(shape: tuple[int, ...]) -> None:
    ranks, size = torch.Size(shape).numel(), dist.get_world_size()
    if size % ranks:
        raise ValueError(
            f"A mesh of {' x '.join(map(str, shape))} takes {ranks} ranks, which do not divide "
            f"the world of {size}. Change the mesh, or simulate(..., world={ranks})."
        )
