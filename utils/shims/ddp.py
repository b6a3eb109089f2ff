"""DistributedDataParallel: the sizes of its buckets, and its C++ reducer modelled without data.

The reducer reads data pointers, which simulated tensors lack. What it does to memory is simple:
it keeps flat buckets, copies each gradient in, reduces a bucket once it is full, copies back.
Everything else of `DistributedDataParallel` is PyTorch's own, which runs as it is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from utils.shims.shim import Library, Shim

DDP = Library("torch", "2.15.0", "utils/shims/ddp.py")

_LOGGED = Shim(
    DDP,
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "bucket_bytes",
    "nothing public says how large the buckets are",
)
_REDUCER = Shim(
    DDP, "torch.distributed:Reducer", "modelled_reducer", "it reads data pointers", patched=True
)
_LOGGER = Shim(
    DDP,
    "torch.distributed:Logger",
    "modelled_reducer",
    "it takes PyTorch's own reducer alone",
    patched=True,
)
_VERIFY = Shim(
    DDP,
    "torch.distributed:_verify_params_across_processes",
    "modelled_reducer",
    "it compares shapes with ranks that are not there",
    patched=True,
)
_BROADCAST = Shim(
    DDP,
    "torch.distributed:_broadcast_coalesced",
    "modelled_reducer",
    "it reads data pointers",
    patched=True,
)
_ASSIGN = Shim(
    DDP,
    "torch.distributed:_compute_bucket_assignment_by_size",
    "modelled_reducer",
    "the modelled reducer fills its buckets by PyTorch's own rule",
)
_FLATTEN = Shim(
    DDP,
    "torch._utils:_flatten_dense_tensors",
    "modelled_reducer",
    "one tensor alone is not copied, and several are",
)
SHIMS = (_LOGGED, _REDUCER, _LOGGER, _VERIFY, _BROADCAST, _ASSIGN, _FLATTEN)

COMM_HOOK = "a communication hook of DistributedDataParallel"  # what the simulator tells apart by
NOT_SYNCED = "the first backward of a static graph inside no_sync()"  # and this
Indices = Sequence[Sequence[int]]


def bucket_bytes(model: Any) -> tuple[int, ...]:
    """Bytes of the buckets of a `DistributedDataParallel`, as it has them since its second step."""
    logged = _LOGGED.get()(model)
    text = str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
    return tuple(int(part) for part in text.split(",") if part.strip())


class ModelledReducer:
    """Stands in for `torch.distributed.Reducer` while a simulation runs.

    Follows torch/csrc/distributed/c10d/reducer.cpp (`initialize_buckets`, `rebuild_buckets`,
    `mark_variable_ready_dense`). The first buckets follow the parameters; after the first
    backward they follow the order in which gradients came, the first of 1 MiB, the others of
    25 MiB or the cap given. A bucket closes with the gradient that reaches its limit.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Indices,
        bucket_limits: list[int],
        process_group: Any,
        sparse: list[bool],
        cap_bytes: int,
        find_unused: bool,
        as_view: bool,
        names: dict[int, str],
        first_cap_bytes: int,
        skip_unused: bool = False,
        python_reducer: bool = False,
        rebuild_limits: Sequence[int] = (),
        batched_copy: bool = False,
        lazy: bool = False,
    ) -> None:
        if any(sparse) or lazy:
            raise ValueError(
                "A simulation models DistributedDataParallel's dense buckets, kept for good. "
                "Leave out sparse gradients (Embedding(sparse=True)) and lazy_bucket_allocation."
            )
        self._params, self._group, self._as_view = list(params), process_group, as_view
        self._limits = list(rebuild_limits) or [first_cap_bytes, cap_bytes]
        self._rebuilds, self._reduces = not find_unused, False
        self._delays = False  # whether all is reduced at the end, as in a static graph's first step
        self._arrived: list[int] = []
        self._missing: list[int] = []
        self._allocate(bucket_indices)
        # Where the real one hooks in: after .grad is set, and after hooks on the parameter itself.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._params]
        for index, node in enumerate(self._nodes):
            node.register_hook(self._hook(index))

    def set_logger(self, logger: Any) -> None:
        """Nothing is logged."""

    def prepare_for_forward(self) -> None:
        """Times are not taken."""

    def prepare_for_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """From here on gradients are reduced; not called inside `no_sync()`."""
        self._reduces = True
        self._missing = [len(bucket) for bucket in self._indices]

    def _set_static_graph(self) -> None:
        self._rebuilds = self._delays = True

    def _delay_all_reduce(self) -> None:
        """The end of a static graph's first backward (reducer.cpp, `delay_all_reduce`)."""
        if not self._reduces:
            raise RuntimeError(NOT_SYNCED)
        self._delays = False
        for index, parameter in enumerate(self._params):
            if parameter.grad is not None:
                self._gradient_ready(index)

    def _rebuild_buckets(self) -> bool:
        """Before the second forward: buckets in the order in which the gradients came."""
        if not self._rebuilds or len(self._arrived) < len(self._params):
            return False
        order = self._arrived[: len(self._params)]
        tensors, sparse = [self._params[i] for i in order], [False] * len(order)
        indices, _ = _ASSIGN.get()(tensors, self._limits, sparse, order)
        self._buckets = []  # the old ones go before the new ones come
        self._allocate(indices)
        self._rebuilds = False
        return True

    def sizes_bytes(self) -> list[int]:
        """Bytes of each bucket."""
        return [bucket.nbytes for bucket in self._buckets]

    def _allocate(self, indices: Indices) -> None:
        self._indices, self._buckets = indices, []
        self._place: dict[int, tuple[int, int]] = {}
        for number, members in enumerate(indices):
            sizes = [self._params[i].numel() for i in members]
            starts = itertools.accumulate(sizes, initial=0)
            self._place.update(
                (i, (number, start)) for i, start in zip(members, starts, strict=False)
            )
            like = self._params[members[0]]
            self._buckets.append(torch.empty(sum(sizes), dtype=like.dtype, device=like.device))

    def _hook(self, index: int) -> Any:
        def ready(*_: Any) -> None:
            if self._reduces and self._delays:
                self._arrived.append(index)
            elif self._reduces:
                self._gradient_ready(index)

        return ready

    @torch.no_grad()
    def _gradient_ready(self, index: int) -> None:
        if self._rebuilds and index not in self._arrived:
            self._arrived.append(index)
        number, start = self._place[index]
        parameter, bucket = self._params[index], self._buckets[number]
        part = bucket[start : start + parameter.numel()].view_as(parameter)
        part.copy_(parameter.grad)
        if self._as_view:
            parameter.grad = part
        self._missing[number] -= 1
        if self._missing[number] == 0:
            dist.all_reduce(bucket, group=self._group)
        self._reduces = any(self._missing)


class _Logger:
    """Stands in for `torch.distributed.Logger`: says how large the buckets are."""

    def __init__(self, reducer: ModelledReducer) -> None:
        self._reducer = reducer

    def _get_ddp_logging_data(self) -> Any:
        sizes = ", ".join(map(str, self._reducer.sizes_bytes()))
        return SimpleNamespace(strs_map={"bucket_sizes": sizes}, ints_map={})

    def set_construction_data_and_log(self, *_: Any) -> None: ...
    def set_runtime_stats_and_log(self) -> None: ...
    def set_error_and_log(self, message: str) -> None: ...
    def _set_static_graph(self) -> None: ...

    def _set_comm_hook_name(self, name: str) -> None:
        raise NotImplementedError(f"{COMM_HOOK} ({name})")


@contextlib.contextmanager
def modelled_reducer() -> Iterator[None]:
    """Inside, `DistributedDataParallel` wraps models without data."""
    with (
        _REDUCER.replaced(ModelledReducer),
        _LOGGER.replaced(_Logger),
        _VERIFY.replaced(lambda *_: None),
        _BROADCAST.replaced(_broadcast_coalesced),
    ):
        yield


@torch.no_grad()
def _broadcast_coalesced(
    group: Any, tensors: Sequence[torch.Tensor], cap_bytes: int, source: int = 0
) -> None:
    """Broadcast from one rank through flat copies of at most about `cap_bytes`."""
    if not tensors:
        return
    limits, sparse = [cap_bytes], [False] * len(tensors)
    indices, _ = _ASSIGN.get()(list(tensors), limits, sparse)
    for members in indices:
        flat = _FLATTEN.get()([tensors[i] for i in members])
        dist.broadcast(flat, src=source, group=group)
