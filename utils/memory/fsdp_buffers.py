"""The flat buffers that FSDP2 gathers parameters in and reduces gradients from, made known.

They belong to no module and no tensor of the learner's, so that only FSDP's own functions can
tell: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives


@contextlib.contextmanager
def noted_buffers(note: Callable[[list[Any]], None]) -> Iterator[None]:
    """Inside, `note` is called with each buffer of FSDP2 as soon as there is one.

    What a reduce-scatter leaves is not among them: it becomes the gradient.
    """
    gather, fill = collectives.DefaultAllGather, collectives.foreach_reduce_scatter_copy_in
    allocate = gather.allocate

    @functools.wraps(allocate)
    def allocated(*args: Any, **kwargs: Any) -> Any:
        buffer = allocate(*args, **kwargs)
        note([buffer])
        return buffer

    @functools.wraps(fill)
    def filled(gradients: Any, buffer: Any, world_size: int) -> None:
        note([buffer])
        fill(gradients, buffer, world_size)

    with (
        mock.patch.object(gather, "allocate", allocated),
        mock.patch.object(collectives, "foreach_reduce_scatter_copy_in", filled),
    ):
        yield
