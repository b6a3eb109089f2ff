"""Memory that communication takes and gives back on a CPU, where gloo does it.

On a GPU, NCCL has buffers of its own, outside of the CUDA allocator, and FSDP casts while it
copies: nothing is needed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from utils.simulation.scratch import Scratch
from utils.traffic.collectives import operator_name

_FUNCTIONAL = "_c10d_functional::"


def with_gloo(kernels: Scratch) -> Scratch:
    """The scratch memory of a device's kernels, and of gloo's collectives beside them."""

    def scratch(
        func: Any, args: tuple[Any, ...], out: Any, kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> int:
        if func.namespace in ("c10d", "_c10d_functional"):
            return gloo_scratch(func, args, out)
        if operator_name(func) == "fsdp::chunk_cat_mixed_dtype":
            return _cast_bytes(args[0], out.dtype)
        return kernels(func, args, out, kwargs)

    return scratch


def gloo_scratch(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes beyond arguments and results at a collective's worst moment.

    torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: an all-gather arrives in a flat buffer as
    large as its result (`AsyncAllgatherWork`); a reduce-scatter reduces a copy of its whole
    input (`reduce_scatter_tensor_coalesced`); the others work in place.
    """
    name = operator_name(func)
    if "all_gather" in name:
        return _bytes(out)
    if "allgather" in name:
        return _bytes(args[0])
    if "reduce_scatter" in name:
        return _bytes(args[0] if name.startswith(_FUNCTIONAL) else args[1])
    return 0


def _cast_bytes(gradients: list[torch.Tensor], to: torch.dtype) -> int:
    """FSDP's copies of gradients of another type than the one that it reduces in."""
    return sum(g.numel() * to.itemsize for g in gradients if g.dtype is not to)


def _bytes(tensors: Any) -> int:
    leaves = tree_leaves(tensors)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
