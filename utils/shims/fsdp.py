"""FSDP2: the flat buffers that it gathers parameters in and reduces gradients from, made known; and
the shards that `CPUOffloadPolicy` keeps on the host.

And HSDP's sums of a node. They belong to no module and no tensor of the learner's, so that only FSDP's own functions can
tell: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from utils.shims.shim import Library, Shim

FSDP = Library("torch", "2.15.0", "utils/shims/fsdp.py")
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives:"

_ALLOCATE = Shim(
    FSDP,
    _COLLECTIVES + "DefaultAllGather.allocate",
    "noted_buffers",
    "the buffer of an all-gather is nobody's attribute",
    patched=True,
)
_FILL = Shim(
    FSDP,
    _COLLECTIVES + "foreach_reduce_scatter_copy_in",
    "noted_buffers",
    "the buffer of a reduce-scatter is nobody's attribute",
    patched=True,
)
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam."
_SHARD = Shim(
    FSDP,
    _PARAM + "_init_sharded_param",
    "shards_on_host",
    "in a simulation host and device have one name, so that a policy's copies would not be made",
    patched=True,
)
_GRADIENT = Shim(
    FSDP,
    _PARAM + "to_sharded_dtensor",
    "shards_on_host",
    "in a simulation a gradient would not leave for the host: it has the device's name",
    patched=True,
)
_STATE = Shim(
    FSDP,
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "sums_in_the_node",
    "what HSDP has reduced in a node and not yet between nodes is nobody's gradient",
)
SHIMS = (_ALLOCATE, _FILL, _SHARD, _GRADIENT, _STATE)


@contextlib.contextmanager
def noted_buffers(note: Callable[[list[Any]], None]) -> Iterator[None]:
    """Inside, `note` is called with each buffer of FSDP2 as soon as there is one.

    What a reduce-scatter leaves is not among them: it becomes the gradient.
    """
    allocate, fill = _ALLOCATE.get(), _FILL.get()

    @functools.wraps(allocate)
    def allocated(*args: Any, **kwargs: Any) -> Any:
        buffer = allocate(*args, **kwargs)
        note([buffer])
        return buffer

    @functools.wraps(fill)
    def filled(gradients: Any, buffer: Any, world_size: int) -> None:
        note([buffer])
        fill(gradients, buffer, world_size)

    with _ALLOCATE.replaced(allocated), _FILL.replaced(filled):
        yield


@contextlib.contextmanager
def shards_on_host(
    to_host: Callable[[], AbstractContextManager[Any]], device: Any
) -> Iterator[None]:
    """Inside, shards under `CPUOffloadPolicy` and their gradients are made in `to_host()`.

    `device` is what they are copied to before each gather.
    """
    shard, wrap = _SHARD.get(), _GRADIENT.get()

    @functools.wraps(shard)
    def sharded(param: Any, *args: Any, **kwargs: Any) -> None:
        if not param.offload_to_cpu:
            return shard(param, *args, **kwargs)
        with to_host():
            shard(param, *args, **kwargs)
        param.device = device
        return None

    @functools.wraps(wrap)
    def wrapped(param: Any, tensor: Any) -> Any:
        is_gradient = param.offload_to_cpu and hasattr(param, "sharded_param")
        if is_gradient:
            with to_host():
                tensor = tensor.clone()
        return wrap(param, tensor)

    with _SHARD.replaced(sharded), _GRADIENT.replaced(wrapped):
        yield


def sums_in_the_node(model: Any) -> list[Any]:
    """Gradients that HSDP has added up in a node and not between nodes (`set_requires_all_reduce`)."""
    from torch.distributed.fsdp import FSDPModule

    state = _STATE.get()
    sharded = (module for module in model.modules() if isinstance(module, FSDPModule))
    groups = (group for module in sharded for group in _groups(state(module)))
    sums = (group._partial_reduce_output for group in groups)
    return [each for each in sums if each is not None]


def _groups(state: Any) -> list[Any]:
    """A module's groups of parameters. Up to PyTorch 2.11 it has one, or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [group for group in (state._fsdp_param_group,) if group is not None]
