"""FSDP2: the flat buffers that it gathers parameters in and reduces gradients from, made known.

They belong to no module and no tensor of the learner's, so that only FSDP's own functions can
tell: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
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
SHIMS = (_ALLOCATE, _FILL)


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
