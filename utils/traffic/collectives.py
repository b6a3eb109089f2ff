"""What one rank sends and receives in a step: collectives and bytes by mesh axis and type.

Every operator of torch.distributed is either counted, or known to carry nothing, or refused: one
that is not known here would else count as no bytes at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from utils.shims.torch_distributed import as_group
from utils.units import format_bytes

# Operator -> what it is called, and where its payload stands among the arguments.
_KINDS: Mapping[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::_allgather_base_": ("all-gather", 1),
    "c10d::allgather_": ("all-gather", 1),
    "c10d::allgather_coalesced_": ("all-gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::alltoall_": ("all-to-all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::gather_into_tensor_": ("gather", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "c10d::recv_any_source_": ("receive", 0),
    "c10d::scatter_": ("scatter", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_reduce_": ("all-reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": ("all-reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all-gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::isend": ("send", 0),
    "_c10d_functional::irecv": ("receive", 0),
    "_dtensor::shard_dim_alltoall": ("all-to-all", 0),
}
# Several sends and receives in one call: which, and their tensors, among the arguments.
_BATCH, _BATCH_KINDS = "_c10d_functional::batch_p2p_ops", {"isend": "send", "irecv": "receive"}
# Operators without a payload.
_SILENT = frozenset(
    {
        "c10d::barrier",
        "c10d::monitored_barrier_",
        "c10d::check_for_nan",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::wait_tensors",
        "_c10d_functional::_wrap_tensor_autograd",
        "_dtensor::mesh_get_process_group",
    }
)
_NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "_dtensor",
    "symm_mem",
)


class UnknownOperation(ValueError):
    """An operator of torch.distributed that the counter does not know; `name` is the operator's."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} communicates, and the counter of traffic does not know it, so its bytes would "
            "be missing. Leave it out of what is counted, or add it to utils/traffic/collectives.py."
        )
        self.name = name


class Collective(NamedTuple):
    """One collective of this rank: its payload is what the rank puts in, at `time_ns`."""

    time_ns: int
    kind: str
    axis: str
    dtype: torch.dtype
    payload_bytes: int


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind, mesh axis and element type in one step, or at start-up.

    `payload_bytes` adds up what this rank puts in: for an all-gather its shard, for a
    reduce-scatter and an all-reduce the whole tensor, for a broadcast or scatter the tensor that
    arrives. What crosses a link follows from it and the algorithm: a ring of N ranks sends
    (N - 1) x payload for an all-gather, (N - 1) / N x payload for a reduce-scatter, and
    2 (N - 1) / N x payload for an all-reduce, per rank.
    """

    collective: str
    axis: str
    dtype: str
    calls: int
    payload_bytes: int
    at_startup: bool = False

    def __str__(self) -> str:
        when = " at start-up" if self.at_startup else ""
        return (
            f"{self.calls} x {self.collective} over {self.axis}{when}, "
            f"{format_bytes(self.payload_bytes)} of {self.dtype}"
        )


@functools.cache
def operator_name(func: Any) -> str:
    """The name of an operator without its overload, such as "aten::add"."""
    return func.name().partition(".")[0]


def collectives_of(
    func: Any, args: tuple[Any, ...], time_ns: int, axis_of: Callable[[Any], str]
) -> list[Collective]:
    """The collectives of an operator call, one for each element type; none for other operators.

    `axis_of` names the mesh axis of a process group, given as such or by its name.

    Raises:
        UnknownOperation: it communicates, and is not known here.
    """
    if func.namespace not in _NAMESPACES:
        return []
    name = operator_name(func)
    if name in _SILENT:
        return []
    if name != _BATCH and name not in _KINDS:
        raise UnknownOperation(name)
    axis = axis_of(_group(args))
    return [
        Collective(time_ns, kind, axis, dtype, size)
        for kind, payload in _payloads(name, args)
        for dtype, size in _bytes_by_dtype(payload).items()
    ]


def _payloads(name: str, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    if name == _BATCH:
        for operation, tensor in zip(args[0], args[3], strict=True):
            yield _BATCH_KINDS[operation], tensor
    else:
        kind, place = _KINDS[name]
        yield kind, args[place]


def _bytes_by_dtype(payload: Any) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    for tensor in tree_leaves(payload):
        if isinstance(tensor, torch.Tensor):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return sizes


def summed(collectives: Iterable[Collective], at_startup: bool = False) -> tuple[Traffic, ...]:
    """Add up calls and bytes by kind, axis and type, in the order of first appearance."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in collectives:
        key = (row.kind, row.axis, str(row.dtype).removeprefix("torch."))
        both = sums.setdefault(key, [0, 0])
        both[0] += 1
        both[1] += row.payload_bytes
    return tuple(Traffic(*key, calls, size, at_startup) for key, (calls, size) in sums.items())


def _group(args: tuple[Any, ...]) -> Any:
    """The process group among the arguments; functional collectives may give its name, last."""
    for arg in args:
        if (group := as_group(arg)) is not None:
            return group
    return args[-1]
