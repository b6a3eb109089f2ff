"""What programs do around a step that has no counterpart in a simulation: left out with a remark,
done another way, or refused with a sentence."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing.process
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn

from utils.shims.torch_ import with_data
from utils.simulation.refusals import NotSimulated

Remark = Callable[[str], None]
GROUP = "init_process_group() is left out: a simulation brings its own world, world=n ranks."
EVEN = "join() is left out: every rank has as many inputs as the others."
THREADS = "A thread is started by the program: what it makes is not counted."
SCRIPTED = "torch.jit is left out: the step is simulated as the Python that it was made from."
WORKERS = (
    "A DataLoader's workers are left out: its samples are made in the step's own process, one batch "
    "at a time."
)
FORWARDS = (
    "Derivatives taken forwards (jvp) are approximated, some percent high: zeros among them, which "
    "take no memory, are counted where PyTorch makes none."
)
STREAMS = "record_stream() is left out: on a GPU the memory that it marks is free a little later."


@contextlib.contextmanager
def left_out(remark: Remark, ranks: int, is_cuda: bool) -> Iterator[None]:
    """Inside, groups, scripts, loaders, streams, processes and replicas are a simulation's."""
    with contextlib.ExitStack() as stack:
        for owner, name, by in _replacements(remark, ranks):
            stack.enter_context(mock.patch.object(owner, name, by))
        if is_cuda:
            for owner in (torch.cuda, torch.cuda.memory):
                name = "caching_allocator_alloc"
                stack.enter_context(mock.patch.object(owner, name, _no_bytes))
            stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", _NoGraph))
        yield


def _replacements(remark: Remark, ranks: int) -> Iterator[tuple[Any, str, Any]]:
    yield dist, "init_process_group", _joined(remark, ranks)
    yield dist, "destroy_process_group", lambda group=None: remark(GROUP)
    yield nn.parallel.DistributedDataParallel, "join", _evenly(remark)
    yield torch.autograd.forward_ad, "make_dual", _noted_dual(remark)
    for name in ("script", "trace", "freeze", "optimize_for_inference"):
        yield torch.jit, name, _as_python(getattr(torch.jit, name), remark)
    yield torch.utils.data.DataLoader, "__iter__", _in_this_process(remark)
    yield torch.Tensor, "record_stream", lambda tensor, stream: remark(STREAMS)
    yield nn.DataParallel, "__init__", _one_replica
    if hasattr(rpc, "init_rpc"):  # builds without it lack the name
        yield rpc, "init_rpc", _no_calls
    yield multiprocessing.process.BaseProcess, "start", _no_process
    yield threading.Thread, "start", _with_thread(remark)


def _joined(remark: Remark, ranks: int) -> Callable[..., None]:
    def join(*args: Any, **kwargs: Any) -> None:
        size = kwargs.get("world_size", -1)
        if size not in (-1, ranks):
            raise NotSimulated(
                f"joins a group of {size}, and this simulation has {ranks}: write "
                f"simulate(..., world={size})."
            )
        remark(GROUP)

    return join


def _noted_dual(remark: Remark) -> Callable[..., Any]:
    make_dual = torch.autograd.forward_ad.make_dual

    def noted(*args: Any, **kwargs: Any) -> Any:
        remark(FORWARDS)
        return make_dual(*args, **kwargs)

    return noted


def _evenly(remark: Remark) -> Callable[..., Any]:
    def join(*args: Any, **kwargs: Any) -> Any:
        remark(EVEN)
        return contextlib.nullcontext()

    return join


def _with_thread(remark: Remark) -> Callable[[Any], None]:
    start = threading.Thread.start

    def started(thread: Any) -> None:
        if type(thread) is threading.Thread:  # those of libraries are of classes of their own
            remark(THREADS)
        start(thread)

    return started


def _no_process(process: Any) -> None:
    raise NotSimulated(
        "starts another process, and a simulation is of one: a rank of many is "
        "simulate(..., world=n, rank=k), with what that process runs as build and step."
    )


def _as_python(plain: Callable[..., Any], remark: Remark) -> Callable[..., Any]:
    def kept(made_from: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _asked_by_torch(
            inspect.currentframe()
        ):  # formulas for derivatives forwards, loaded when used
            with with_data():
                return plain(made_from, *args, **kwargs)
        remark(SCRIPTED)
        return made_from if made_from is not None else lambda function: function

    return kept


def _asked_by_torch(own: FrameType | None) -> bool:
    caller = own.f_back if own is not None else None
    return caller is not None and caller.f_globals.get("__name__", "").startswith("torch.")


def _in_this_process(remark: Remark) -> Callable[[Any], Any]:
    plain = torch.utils.data.DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        if not loader.num_workers:
            return plain(loader)
        remark(WORKERS)
        settings = {"num_workers": 0, "timeout": 0, "prefetch_factor": None}
        before = {name: getattr(loader, name) for name in settings}
        try:
            vars(loader).update(settings)
            return plain(loader)
        finally:
            vars(loader).update(before)

    return iterate


def _one_replica(
    self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
) -> None:
    """As `nn.DataParallel` is without GPUs, and nearly as it is with one: it calls the module."""
    if device_ids is not None and len(device_ids) > 1:
        raise NotSimulated(
            "splits its batch over several GPUs of one process (DataParallel), and each rank of a "
            "simulation has one. Wrap the model in DistributedDataParallel, and write "
            f"simulate(..., world={len(device_ids)})."
        )
    nn.Module.__init__(self)
    self.module, self.device_ids, self.dim = module, [], dim


def _no_calls(*args: Any, **kwargs: Any) -> None:
    raise NotSimulated(
        "starts remote procedure calls (torch.distributed.rpc), whose other end is not there. Simulate "
        "what each process runs by itself, as build and step, or use collectives in a world of n ranks."
    )


def _no_bytes(*args: Any, **kwargs: Any) -> None:
    raise NotSimulated(
        "takes memory from the allocator as an address (caching_allocator_alloc), and simulated memory "
        "has none. Make a tensor of that size: torch.empty(size, dtype=torch.uint8, device='cuda')."
    )


class _NoGraph:
    """A class, as what it stands for: libraries imported within a simulation name it in annotations."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _NoGraph:
        raise NotSimulated(
            "captures a CUDA graph, whose memory is a pool of its own. Leave it out: the step is then "
            "simulated as it runs without, and a graph keeps that peak for good."
        )
