"""`torch.cuda` in a simulation: it answers for the simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from utils.memory.host import host_memory
from utils.shims.torch_autocast import autocast_as_on_cpu
from utils.simulation.devices import SimulatedDevice
from utils.simulation.simulated_memory import DEVICE, HOST
from utils.simulation.watcher import StorageWatcher


@contextlib.contextmanager
def cuda_module(watcher: StorageWatcher, card: SimulatedDevice) -> Iterator[None]:
    """Inside, `torch.cuda`, autocast and offloading stand for the simulated device."""
    with contextlib.ExitStack() as stack:
        for name, answer in answers(watcher, card).items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(_saved_on_host(watcher))
        stack.enter_context(_replicas_anywhere())
        stack.enter_context(autocast_as_on_cpu())
        yield


def answers(watcher: StorageWatcher, card: SimulatedDevice) -> dict[str, Callable[..., Any]]:
    """What each function of `torch.cuda` says or does."""
    total = card.total_bytes
    stats = {
        "requested_bytes.all.peak": lambda: watcher.peak_bytes,
        "allocated_bytes.all.current": lambda: watcher.alive_bytes,
        "allocated_bytes.all.peak": lambda: watcher.peak_bytes,
        "reserved_bytes.all.current": lambda: watcher.reserved_bytes,
        "reserved_bytes.all.peak": lambda: watcher.reserved_bytes,
    }
    properties = SimpleNamespace(
        name=card.name,
        total_memory=total,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.multiprocessors,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        gcnArchName="",
        L2_cache_size=40 << 20,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=48 << 10,
    )
    said: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": card.name,
        "get_device_properties": properties,
        "get_device_capability": card.capability,
        "is_bf16_supported": card.flash,
        "is_current_stream_capturing": False,
        "utilization": 0,
        "get_arch_list": [],
        "can_device_access_peer": False,
    }
    nothing = (
        "init",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "set_device",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "set_rng_state",
        "set_rng_state_all",
        "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
        "set_stream",
    )
    return {
        **{name: _says(value) for name, value in said.items()},
        **{name: _says(None) for name in nothing},
        "memory_allocated": _asks(lambda: watcher.alive_bytes),
        "max_memory_allocated": _asks(lambda: watcher.peak_bytes),
        "memory_reserved": _asks(lambda: watcher.reserved_bytes),
        "max_memory_reserved": _asks(lambda: watcher.reserved_bytes),
        "reset_peak_memory_stats": _asks(watcher.reset_peak),
        "reset_max_memory_allocated": _asks(watcher.reset_peak),
        "mem_get_info": _asks(lambda: (max(0, total - watcher.reserved_bytes), total)),
        "memory_stats": _asks(lambda: {name: ask() for name, ask in stats.items()}),
        "memory_summary": _asks(lambda: f"allocated {watcher.alive_bytes:,} bytes, simulated"),
        "get_rng_state": _asks(_rng_state),
        "get_rng_state_all": _asks(lambda: [_rng_state()]),
        "device": _Nothing,
        "stream": _Nothing,
        "device_of": _Nothing,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _asks(_Stream),
        "default_stream": _asks(_Stream),
    }


def _says(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _asks(question: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: question()


def _rng_state() -> torch.Tensor:
    with host_memory():
        return torch.empty(16, dtype=torch.uint8)


class _Nothing(contextlib.nullcontext[None]):
    """`torch.cuda.device(0)` and `torch.cuda.stream(s)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Stream(_Nothing):
    """A stream: all simulated work is done when it is asked for."""

    cuda_stream, device_index, priority = 0, 0, 0

    def synchronize(self, *args: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event. No time passes: one millisecond lies between any two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


_PLAIN_GENERATOR = torch.Generator


class _Generator(torch.Generator):
    """A generator for the device: random numbers have no values here."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return _PLAIN_GENERATOR.__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


@contextlib.contextmanager
def _replicas_anywhere() -> Iterator[None]:
    """`DistributedDataParallel(model, device_ids=[0])` takes tensors that PyTorch sees on `cpu`."""
    replicated = torch.nn.parallel.DistributedDataParallel
    init = replicated.__init__

    def set_up(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, module, None, None, *args, **kwargs)

    with mock.patch.object(replicated, "__init__", set_up):
        yield


@contextlib.contextmanager
def _saved_on_host(watcher: StorageWatcher) -> Iterator[None]:
    """`torch.autograd.graph.save_on_cpu` copies to the host, whatever the device is called."""
    saves = torch.autograd.graph.save_on_cpu

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with watcher.placing(HOST):
            return tensor.detach().clone()

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        with watcher.placing(DEVICE):
            return saved.clone()

    def set_up(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        torch.autograd.graph.saved_tensors_hooks.__init__(self, pack, unpack)

    with mock.patch.object(saves, "__init__", set_up):
        yield
