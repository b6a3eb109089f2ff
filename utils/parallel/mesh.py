"""Process group and device mesh of `ParallelDims`, and sums over its axes."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from utils.parallel.dims import ParallelDims
from utils.parallel.loopback import launched_store

_WORDS_BYTES = 256  # of a version and a host name


@contextlib.contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """Inside, this process is one of torchrun's ranks; gives its device.

    Call a function inside, so that models, optimizers and losses are local to it and gone at the
    end: sharded modules hold process groups in reference cycles, and a group that lives on when
    Python ends aborts the process at random.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = launched_store()
    who = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if store else (-1, -1)
    dist.init_process_group(backend, store=store, rank=who[0], world_size=who[1])
    try:
        check_versions()
        yield device
    finally:
        gc.collect()
        dist.destroy_process_group()


def check_versions() -> None:
    """All ranks have the same PyTorch; nodes of one cluster may not.

    Raises:
        RuntimeError: they have not; on every rank, so that none waits for the others.
    """
    hosts: dict[str, list[str]] = {}
    for version, host in _told((str(torch.__version__), socket.gethostname())):
        hosts.setdefault(version, []).append(host)
    if len(hosts) > 1:
        each = "; ".join(f"{v} on {', '.join(sorted(set(at)))}" for v, at in sorted(hosts.items()))
        raise RuntimeError(
            f"The nodes have different versions of PyTorch: {each}. Collectives between them may "
            "hang or be wrong: start all nodes from one environment or one container image."
        )


def _told(mine: tuple[str, str]) -> list[tuple[str, str]]:
    """Each rank's pair of words; `all_gather_object` needs numpy, which may not be there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = "\n".join(mine).encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES)
    sent = torch.tensor(list(text), dtype=torch.uint8, device=device)
    rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, sent)
    pairs = (bytes(row.tolist()).decode(errors="replace").rstrip().partition("\n") for row in rows)
    return [(first, second) for first, _, second in pairs]


def device_mesh(dims: ParallelDims, device: torch.device | str) -> DeviceMesh:
    """The mesh of `dims.mesh`, over all ranks of the process group.

    Raises:
        ValueError: the sizes do not multiply out to the number of ranks.
    """
    dims.check_world(dist.get_world_size())
    kind = torch.device(device).type
    return init_device_mesh(kind, tuple(dims.mesh.values()), mesh_dim_names=tuple(dims.mesh))


def axes_of(mesh: DeviceMesh, wanted: Sequence[str]) -> tuple[str, ...]:
    """Those of the wanted axes that the mesh has, in its own order."""
    return tuple(axis for axis in mesh.mesh_dim_names or () if axis in wanted)


def ranks_along(mesh: DeviceMesh, wanted: Sequence[str]) -> int:
    """Ranks along the wanted axes together; an axis that the mesh lacks has one."""
    names = mesh.mesh_dim_names or ()
    return math.prod(mesh.size(names.index(axis)) for axis in axes_of(mesh, wanted))


def sum_over(mesh: DeviceMesh, wanted: Sequence[str], value: Tensor) -> Tensor:
    """`value` added up over the ranks of the wanted axes, in place."""
    for axis in axes_of(mesh, wanted):
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value
