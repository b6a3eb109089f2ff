"""What one rank sends and receives in a step: collectives and bytes by mesh axis and type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from utils.units import format_bytes

# Operator -> what it is called, and where its payload stands among the arguments.
_KINDS: Mapping[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::_allgather_base_": ("all-gather", 1),
    "c10d::allgather_": ("all-gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::alltoall_": ("all-to-all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::gather_": ("gather", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "c10d::recv_any_source_": ("receive", 0),
    "c10d::scatter_": ("scatter", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_reduce_": ("all-reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all-reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", 0),
    "_c10d_functional::all_gather_into_tensor_out": ("all-gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all-gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce-scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
}  # fmt: skip


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


def collective(
    func: Any, args: tuple[Any, ...], time_ns: int, axis_of: Callable[[Any], str]
) -> Collective | None:
    """Read a collective off an operator call; None for any other operator.

    `axis_of` names the mesh axis of a process group, given as such or by its name.
    """
    kind = _KINDS.get(func._schema.name)
    if kind is None:
        return None
    tensors = [t for t in tree_leaves(args[kind[1]]) if isinstance(t, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    return Collective(time_ns, kind[0], axis_of(_group(args)), tensors[0].dtype, size)


def summed(collectives: Iterable[Collective], at_startup: bool = False) -> tuple[Traffic, ...]:
    """Add up calls and bytes by kind, axis and type, in the order of first appearance."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for row in collectives:
        key = (row.kind, row.axis, str(row.dtype).removeprefix("torch."))
        both = sums.setdefault(key, [0, 0])
        both[0] += 1
        both[1] += row.payload_bytes
    return tuple(Traffic(*key, *both, at_startup) for key, both in sums.items())


def _group(args: tuple[Any, ...]) -> Any:
    """The process group among the arguments; functional collectives may give its name, last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    return args[-1]
