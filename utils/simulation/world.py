"""A world of any size on one machine: process groups that hold no one, meshes without data.

PyTorch's `fake` process group answers every collective at once and moves nothing. Memory and
the sequence of operations of one rank do not depend on what the others send.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from utils.simulation.data_parallel import modelled_reducer

# These compute with the numbers of ranks, in tensors: with data, so outside of fake mode.
_MESH_METHODS = ("__getitem__", "_flatten", "_unflatten", "_concatenate", "_get_all_submeshes")


@dataclass
class World:
    """What a simulation notes of its world: the mesh axis of each group, the modules split."""

    axes: dict[str, str] = field(default_factory=dict)
    split: dict[nn.Module, DeviceMesh] = field(default_factory=dict)

    def axis(self, group: Any) -> str:
        """The name of the mesh axis that a process group, or the group of a name, stands for."""
        name = group if isinstance(group, str) else group.group_name
        return self.axes.get(name, "world")


@contextlib.contextmanager
def simulated_world(size: int, rank: int) -> Iterator[World]:
    """One rank of a world of `size`; the process group is destroyed at the end, come what may.

    Raises:
        ValueError: there can be no such rank, or a process group exists already.
    """
    _check(size, rank)
    world = World()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with _environment(rank, size), _meshes(world), _noted_splits(world), modelled_reducer():
            yield world
    finally:
        dist.destroy_process_group()


def check_heads(model: nn.Module, world: World) -> None:
    """Refuse attention whose heads do not come out whole when tensor parallelism splits them.

    Raises:
        ValueError: naming the layer, its number of heads and the number of ranks.
    """
    for path, module in model.named_modules():
        width = getattr(module, "head_dim", None)
        for name, layer in module.named_children() if isinstance(width, int) else ():
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


@contextlib.contextmanager
def _meshes(world: World) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        patch = functools.partial(mock.patch.object, DeviceMesh)
        stack.enter_context(patch("__init__", _noting_axes(DeviceMesh.__init__, world)))
        stack.enter_context(patch("mesh", property(_with_data(DeviceMesh.mesh.fget))))
        for name in _MESH_METHODS:
            static = isinstance(vars(DeviceMesh)[name], staticmethod)
            method = _with_data(getattr(DeviceMesh, name))
            stack.enter_context(patch(name, staticmethod(method) if static else method))
        yield


def _with_data(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return call


def _noting_axes(init: Callable[..., None], world: World) -> Callable[..., None]:
    def call(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get("_rank_map")
        with _disable_current_modes():
            if isinstance(ranks, FakeTensor):  # init_device_mesh numbers the ranks in order
                _check_size(kwargs["_layout"].top_level_sizes)
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            init(mesh, *args, **kwargs)
        names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
        for group, axis in zip(getattr(mesh, "_dim_group_names", ()), names, strict=False):
            world.axes.setdefault(group, axis)

    return call


def _check_size(shape: tuple[int, ...]) -> None:
    ranks, size = torch.Size(shape).numel(), dist.get_world_size()
    if size % ranks:
        raise ValueError(
            f"A mesh of {' x '.join(map(str, shape))} takes {ranks} ranks, which do not divide "
            f"the world of {size}. Change the mesh, or simulate(..., world={ranks})."
        )


def _noted_splits(world: World) -> contextlib.AbstractContextManager[Any]:
    """Note which linear layers tensor parallelism splits by columns, that is by heads."""
    apply = ColwiseParallel._apply

    def noting(plan: ColwiseParallel, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        world.split[module] = mesh
        return apply(plan, module, mesh)

    return mock.patch.object(ColwiseParallel, "_apply", noting)
