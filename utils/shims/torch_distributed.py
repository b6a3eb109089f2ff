"""torch.distributed: process groups, meshes and sharded tensors, where nothing public serves."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from utils.shims.shim import Library, Shim
from utils.shims.torch_ import type_name, with_data

TORCH = Library("torch", "2.15.0", "utils/shims/torch_distributed.py")
_MESH = "torch.distributed.device_mesh:DeviceMesh."

_STORE = Shim(
    TORCH,
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "join_alone",
    "the backend `fake` takes this store alone",
)
_RESOLVE = Shim(
    TORCH,
    "torch.distributed.distributed_c10d:_resolve_process_group",
    "group_named",
    "functional collectives give the group by its name",
)
_DEFAULT_STORE = Shim(
    TORCH,
    "torch.distributed.distributed_c10d:_get_default_store",
    "default_store",
    "ranks meet in the group's own store when they leave",
)
_INIT = Shim(
    TORCH,
    _MESH + "__init__",
    "meshes_with_data",
    "a mesh made in a simulation must hold the numbers of its ranks",
    patched=True,
)
_RANKS = Shim(TORCH, _MESH + "mesh", "meshes_with_data", "as for `__init__`", patched=True)
# These compute with the numbers of ranks, in tensors: with data, so outside of the simulation.
_METHODS = tuple(
    Shim(TORCH, _MESH + name, "meshes_with_data", "it computes with tensors of ranks", patched=True)
    for name in ("__getitem__", "_flatten", "_unflatten", "_concatenate", "_get_all_submeshes")
)
_COLUMNS = Shim(
    TORCH,
    "torch.distributed.tensor.parallel:ColwiseParallel._apply",
    "noted_column_splits",
    "a split module does not say over how many ranks",
    patched=True,
)
_ALL_TO_ALL = Shim(
    TORCH,
    "torch.distributed.tensor.placement_types:shard_dim_alltoall",
    "all_to_all_as_on_gpus",
    "on meshes of CPUs it gathers everything, because gloo once had no all-to-all",
    patched=True,
)
_TRACKER = Shim(
    TORCH,
    "torch.distributed._tools.mem_tracker:MemTracker",
    "mem_tracker",
    "PyTorch's own simulator of memory is a peer that `validate` compares with",
)
_DUMP = Shim(
    TORCH,
    "torch._C._distributed_c10d:_dump_fr_trace",
    "recorded_collectives",
    "nothing public reads the flight recorder of this very process",
)
_SCHEDULES = "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime"
_RUNTIME = Shim(
    TORCH,
    _SCHEDULES,
    "pipeline_from_csv",
    "it alone runs a pipeline schedule that a reader wrote",
)
_LOAD = Shim(TORCH, _SCHEDULES + "._load_csv", "pipeline_from_csv", "it reads a schedule from CSV")
_FORGET = Shim(
    TORCH,
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "forget_shardings",
    "results of sharded operations are kept with their mesh, whose groups end with a simulation",
)
SHIMS = (
    _DUMP,
    _RUNTIME,
    _LOAD,
    _FORGET,
    _STORE,
    _RESOLVE,
    _DEFAULT_STORE,
    _INIT,
    _RANKS,
    *_METHODS,
    _COLUMNS,
    _ALL_TO_ALL,
    _TRACKER,
)

# Called with a new mesh's group names and axes; and with the sizes of one that is being made.
NoteMesh = Callable[[dict[str, str]], None]
CheckSizes = Callable[[tuple[int, ...]], None]


def join_alone(rank: int, world_size: int) -> None:
    """Make this process a rank of a group in which every collective returns at once."""
    import torch.distributed as dist

    store = _STORE.get()()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)


def forget_shardings() -> None:
    """Drop what DTensor keeps of operations: a mesh of the same ranks would get an old one's groups."""
    _FORGET.get()()


def group_named(name: str) -> Any:
    """The process group of a name."""
    return _RESOLVE.get()(name)


def default_store() -> Any:
    """The store of the group of all ranks."""
    return _DEFAULT_STORE.get()()


def recorded_collectives(with_stacks: bool = False) -> list[dict[str, Any]]:
    """What the flight recorder holds of this process's collectives, oldest first."""
    with_collectives, only_active = True, False
    dump = pickle.loads(_DUMP.get()(with_collectives, with_stacks, only_active))
    return dump.get("entries", [])


def pipeline_from_csv(path: Any, stages: Any, **settings: Any) -> Any:
    """A schedule of PyTorch's pipelining whose order of actions stands in a file, a line a rank."""
    schedule = _RUNTIME.get()(list(stages), **settings)
    _LOAD.get()(schedule, str(path))
    return schedule


def as_group(argument: Any) -> Any:
    """The process group that an operator's argument is, or None."""
    import torch.distributed as dist

    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in type_name(argument):
        return dist.ProcessGroup.unbox(argument)
    return argument if isinstance(argument, dist.ProcessGroup) else None


def mem_tracker() -> Any:
    """PyTorch's own simulator of memory."""
    return _TRACKER.get()()


@contextlib.contextmanager
def meshes_with_data(note: NoteMesh, check_sizes: CheckSizes) -> Iterator[None]:
    """Inside, meshes are made and divided with data, though a simulation runs.

    `note` hears of every new mesh's axes, by the name of each axis's group.
    """
    owner, _ = _RANKS.owner()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_INIT.replaced(_noting(_INIT.get(), note, check_sizes)))
        stack.enter_context(_RANKS.replaced(property(_apart(_RANKS.get().fget))))
        for method in _METHODS:
            is_static = isinstance(vars(owner)[method.owner()[1]], staticmethod)
            apart = _apart(method.get())
            stack.enter_context(method.replaced(staticmethod(apart) if is_static else apart))
        yield


def _apart(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with with_data():
            return method(*args, **kwargs)

    return call


def _noting(
    init: Callable[..., None], note: NoteMesh, check_sizes: CheckSizes
) -> Callable[..., None]:
    from torch._subclasses.fake_tensor import FakeTensor

    def call(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get("_rank_map")
        args = ("cpu" if device_type == "cuda" else device_type, *args)  # where the tensors are
        with with_data():
            if isinstance(ranks, FakeTensor):  # init_device_mesh numbers the ranks in order
                check_sizes(kwargs["_layout"].top_level_sizes)
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            init(mesh, *args, **kwargs)
        names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
        note(dict(zip(getattr(mesh, "_dim_group_names", ()), names, strict=False)))

    return call


def noted_column_splits(note: Callable[[Any, Any], None]) -> AbstractContextManager[Any]:
    """Inside, `note(module, mesh)` hears which linear layers are split by columns."""
    apply = _COLUMNS.get()

    def noting(plan: Any, module: Any, mesh: Any) -> Any:
        note(module, mesh)
        return apply(plan, module, mesh)

    return _COLUMNS.replaced(noting)


def all_to_all_as_on_gpus() -> AbstractContextManager[Any]:
    """Inside, a DTensor moves its shards to another dimension by an all-to-all, on CPU meshes too.

    As `shard_dim_alltoall` in torch/distributed/tensor/_collective_utils.py does on every other
    kind of device.
    """

    def send(
        tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
    ) -> torch.Tensor:
        group = mesh.get_group(mesh_dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, group)

    return _ALL_TO_ALL.replaced(send)
