"""A model, or its blocks, compiled with a budget for what waits for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

from utils.checked import check_public
from utils.techniques.checkpointing import blocks_of

__all__ = ["compiled"]

PARTITIONS = "aot_eager_decomp_partition"  # a backend without code generation: no C++ compiler


@contextmanager
def compiled(model: nn.Module, budget: float, *, by_block: bool) -> Iterator[Callable[..., Any]]:
    """The model, or each block of it, as one graph that keeps for backward what the budget allows.

    The partitioner decides what is kept, as for every backend of `torch.compile`; the operations run
    as in eager mode. Let the graphs be made, by a first step, before the model is metered.

    Args:
        model: its `blocks` are compiled in place, or it is wrapped as a whole.
        budget: from 0.0, the inputs of each graph, to 1.0, PyTorch's default.
        by_block: a graph for each block, and the rest of the model in eager mode.

    Raises:
        ValueError: a budget beyond that.
    """
    if not 0.0 <= budget <= 1.0:
        raise ValueError(f"budget is {budget}; give a share from 0.0 to 1.0.")
    torch.compiler.reset()
    try:
        with functorch_config.patch(activation_memory_budget=budget):
            for block in blocks_of(model) if by_block else ():
                block.compile(backend=PARTITIONS)
            yield model if by_block else torch.compile(model, backend=PARTITIONS)
    finally:
        torch.compiler.reset()


check_public(globals())
