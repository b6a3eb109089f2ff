"""Where allocation events come from: the CPU's allocator, the profiler, the CUDA allocator.

Each source has the same members: `granularity_bytes` (the allocator rounds sizes up to a multiple
of it), `start()`, `now_ns()` on the events' own clock, `stop()`, which returns the events in order
of time, `address()`, which finds a storage in them (None: it is in another memory), and
`existing`, address and bytes of what was there at the start, as far as it can tell. A source counts
from `start()` on, for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from utils.memory.compile import CompilerError, compile_library
from utils.memory.events import AllocationEvent
from utils.shims.torch_ import (
    clear_cublas_workspaces,
    cuda_snapshot,
    is_allocation,
    record_cuda_history,
)

Result = TypeVar("Result")
# c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize: every block is a multiple of 512 bytes.
CUDA_BLOCK_BYTES = 512


class EventSource(Protocol):
    """What the meter needs of an allocator."""

    name: str
    granularity_bytes: int

    @property
    def existing(self) -> Sequence[tuple[int, int]]: ...
    def start(self) -> None: ...
    def now_ns(self) -> int: ...
    def stop(self) -> list[AllocationEvent]: ...
    def address(self, storage: torch.UntypedStorage) -> int | None: ...


class RealMemory:
    """Sources of real memory: a storage's address is its data pointer.

    There is one for the whole process, so that only one may be in use at a time. Older memory may
    belong to anyone, and is not listed.
    """

    existing: Sequence[tuple[int, int]] = ()

    def address(self, storage: torch.UntypedStorage) -> int:
        return storage.data_ptr()


class CountingSource(RealMemory):
    """The counting CPU allocator of `counting.cpp`: sees every thread, also frees of old memory."""

    name = "counting allocator"
    granularity_bytes = 1

    def __init__(self) -> None:
        self._library = _counting_library()

    def start(self) -> None:
        self._library.meter_record(1)

    def now_ns(self) -> int:
        return self._library.meter_now_ns()

    def stop(self) -> list[AllocationEvent]:
        self._library.meter_record(0)
        rows = np.zeros((self._library.meter_event_count(), 4), dtype=np.int64)
        pointer = rows.ctypes.data_as(ctypes.c_void_p)
        self._library.meter_read(pointer, ctypes.c_int64(len(rows)))
        return [AllocationEvent(*row) for row in rows.tolist()]


def counted(call: Callable[[], Result]) -> tuple[Result, int]:
    """What a call returns, and the most bytes that it had taken at once from the CPU's allocator.

    For calls of a few milliseconds, beside any recording.

    Raises:
        ValueError: there is no counting allocator; `counts_calls` says so before.
    """
    if not counts_calls():
        raise ValueError(f"Bytes of a call cannot be counted here. {_counting_problem()}")
    library = _counting_library()
    library.meter_mark()
    result = call()
    return result, library.meter_peak_since_mark()


def counts_calls() -> bool:
    """Whether this machine has the counting allocator."""
    return _counting_problem() is None


class ProfilerSource(RealMemory):
    """`torch.profiler` with `profile_memory=True`: needs no compiler, holds for one process.

    It does not see frees of memory that was taken before it started, nor those in threads
    that it does not follow.
    """

    name = "torch.profiler"
    granularity_bytes = 1

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else its start lines reach the cell
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._profile.__enter__()

    def now_ns(self) -> int:
        return time.time_ns()

    def stop(self) -> list[AllocationEvent]:
        self._profile.__exit__(None, None, None)
        tree = self._profile.profiler.kineto_results.experimental_event_tree()
        self._profile = None
        return sorted(_memory_events(tree))


class CudaSource(RealMemory):
    """The CUDA caching allocator's own history, as `torch.cuda.memory._snapshot` tells it.

    The history carries *requested* sizes; the allocator hands out multiples of 512 bytes, and
    at times a larger block, which `torch.cuda.max_memory_allocated()` counts and this does not.
    cuBLAS's workspaces are given back at the start, so that they are seen when they are taken again.
    """

    name = "CUDA caching allocator"
    granularity_bytes = CUDA_BLOCK_BYTES

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        clear_cublas_workspaces()
        record_cuda_history(self._device, is_on=True)

    def now_ns(self) -> int:
        return time.time_ns()

    def stop(self) -> list[AllocationEvent]:
        snapshot = cuda_snapshot(self._device)
        record_cuda_history(self._device, is_on=False)
        index = self._device.index if self._device.index is not None else 0
        return events_from_snapshot(snapshot, index)


def events_from_snapshot(snapshot: dict[str, Any], device_index: int = 0) -> list[AllocationEvent]:
    """Read the events of one device from a snapshot in PyTorch's format.

    A block counts until `free_completed`: between the request and its completion another
    stream may still use it, and the allocator still counts it as allocated.
    """
    signs = {"alloc": 1, "free_completed": -1}
    events, last_ns = [], 0
    for entry in snapshot["device_traces"][device_index]:
        if entry["action"] in signs:
            # Times are whole microseconds: keep the order of events that share one.
            last_ns = max(entry["time_us"] * 1000, last_ns + 1)
            size = signs[entry["action"]] * rounded(entry["size"], CUDA_BLOCK_BYTES)
            events.append(AllocationEvent(last_ns, entry["addr"], size))
    return events


def rounded(count_bytes: int, granularity_bytes: int) -> int:
    """Round up to the allocator's granularity."""
    return -(-count_bytes // granularity_bytes) * granularity_bytes


def source_for(device: torch.device, *, allow_compiler: bool = True) -> EventSource:
    """The best source of events for a device.

    Raises:
        ValueError: PyTorch offers no allocation events for this kind of device.
    """
    if device.type == "cuda":
        return CudaSource(device)
    if device.type != "cpu":
        raise ValueError(
            f"The meter reads the memory of CPU and CUDA devices, and this model is on "
            f"'{device.type}'. Move model and data to 'cpu' to count its bytes."
        )
    if allow_compiler and _counting_problem() is None:
        return CountingSource()
    return ProfilerSource()


def prepare() -> str:
    """Install the counting allocator as early as possible; say in one line what will be used.

    Memory that was taken before the installation is never seen to be freed, so this runs in
    a notebook's first cell.
    """
    problem = _counting_problem()
    if problem is None:
        return "CPU memory is counted by the counting allocator: every thread, to the byte."
    return f"CPU memory is read from torch.profiler, one process only. {problem}"


@functools.cache
def _counting_problem() -> str | None:
    try:
        _counting_library()
    except (CompilerError, OSError) as error:
        return str(error)
    return None


@functools.cache
def _counting_library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_library()))
    library.meter_now_ns.restype = ctypes.c_int64
    library.meter_event_count.restype = ctypes.c_int64
    library.meter_peak_since_mark.restype = ctypes.c_int64
    if library.meter_install() != 0:
        raise CompilerError("Another CPU allocator is in force that cannot be wrapped.")
    return library


def _memory_events(nodes: list[Any]) -> Iterator[AllocationEvent]:
    pending = list(nodes)  # a stack, not recursion: deep models nest past Python's limit
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        if is_allocation(node):
            fields = node.extra_fields
            if fields.device.type == "cpu":
                yield AllocationEvent(node.start_time_ns, fields.ptr, fields.alloc_size)
