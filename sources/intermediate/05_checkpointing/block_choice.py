"""The cheapest set of blocks to checkpoint under a memory budget: costs, peak, exact optimum.

Bytes and operations are counted, not timed, so that every machine finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from utils.checked import check_public
from utils.shims.torch_ import storage_key
from utils.techniques.checkpointing import FrozenStatistics, blocks_of, fork_random_state
from utils.units import format_bytes

__all__ = [
    "BlockCost",
    "activation_peak",
    "best_blocks",
    "block_costs",
    "fewest_blocks",
    "recompute_flops",
]


@dataclass(frozen=True)
class BlockCost:
    """What one block keeps for backward, and what it costs to run it again.

    Attributes:
        input_bytes: its inputs; they stay, whether it is checkpointed or not.
        inside_bytes: what it keeps beside them; a checkpointed block gives it up until its backward.
        flops: floating-point operations of one forward, which a checkpoint repeats.
    """

    input_bytes: int
    inside_bytes: int
    flops: int


def activation_peak(costs: Sequence[BlockCost], chosen: Iterable[int]) -> int:
    """The most bytes of activations alive at once in backward, if `chosen` blocks are checkpointed.

    Backward comes to block i when the later blocks are gone. Then the inputs of blocks 0 to i are
    alive, the insides of the blocks before i that were not checkpointed, and the inside of i itself:
    kept since forward, or just recomputed.
    """
    recomputed, kept, peak = set(chosen), 0, 0
    for index, cost in enumerate(costs):
        kept += cost.input_bytes
        peak = max(peak, kept + cost.inside_bytes)
        if index not in recomputed:
            kept += cost.inside_bytes
    return peak


def recompute_flops(costs: Sequence[BlockCost], chosen: Iterable[int]) -> int:
    """Operations that `chosen` blocks repeat in backward.

    Raises:
        ValueError: a chosen block is none of those.
    """
    chosen = set(chosen)
    if missing := [index for index in chosen if index not in range(len(costs))]:
        raise ValueError(f"chosen has {missing[0]}, and there are {len(costs)} blocks, from 0 on.")
    return sum(costs[index].flops for index in chosen)


def best_blocks(costs: Sequence[BlockCost], limit_bytes: int) -> frozenset[int]:
    """The set of blocks with the fewest repeated operations whose peak stays within the limit.

    Exact: goes through the blocks in order and drops a partial choice only where another keeps no
    more bytes at no higher cost.

    Raises:
        ValueError: even with every block checkpointed the peak is higher.
    """
    partial: list[tuple[int, int, frozenset[int]]] = [(0, 0, frozenset())]  # kept, cost, chosen
    for index, cost in enumerate(costs):
        grown = []
        for kept, spent, chosen in partial:
            kept += cost.input_bytes
            if kept + cost.inside_bytes <= limit_bytes:
                grown.append((kept + cost.inside_bytes, spent, chosen))
                grown.append((kept, spent + cost.flops, chosen | {index}))
        partial = list(_undominated(grown))
    if not partial:
        least = format_bytes(activation_peak(costs, range(len(costs))))
        raise ValueError(
            f"{format_bytes(limit_bytes)} cannot be reached by choosing blocks: with all of them "
            f"checkpointed the peak is {least}. Make blocks smaller, or the batch."
        )
    return min(partial, key=lambda choice: (choice[1], choice[0]))[2]


def _undominated(
    choices: list[tuple[int, int, frozenset[int]]],
) -> Iterator[tuple[int, int, frozenset[int]]]:
    cheapest: int | None = None
    for choice in sorted(choices, key=lambda c: (c[0], c[1], sorted(c[2]))):
        if cheapest is None or choice[1] < cheapest:
            cheapest = choice[1]
            yield choice


def fewest_blocks(
    reserved_by: Callable[[int], int], limit_bytes: float, freed_bytes: float, depth: int
) -> int:
    """How many of the first blocks to checkpoint, so that a step reserves no more than the limit.

    Begins with the overflow divided by what one block gives back, and goes up from there.

    Args:
        reserved_by: what the step reserves if so many blocks are checkpointed.
        limit_bytes: the most that it may reserve.
        freed_bytes: what one block gives back, about: where it gives back more, one block fewer may
            fit.
        depth: how many blocks there are.

    Raises:
        ValueError: not even with all of them does the step fit.
    """
    over_bytes = reserved_by(0) - limit_bytes
    for blocks in range(max(0, math.ceil(over_bytes / freed_bytes)), depth + 1):
        if reserved_by(blocks) <= limit_bytes:
            return blocks
    raise ValueError(f"The step does not fit even if all {depth} blocks are checkpointed.")


def block_costs(model: nn.Module, *inputs: Any) -> list[BlockCost]:
    """Count each block's bytes and operations in one forward of the model.

    Bytes are those of whole storages that autograd saves, each counted where it is saved first.
    Parameters and buffers do not count. Takes the model as it is: without checkpointing.

    Raises:
        ValueError: the model shows no blocks, or one of them did not run.
    """
    blocks = blocks_of(model)
    seen, saved, kept = _owned(model), {}, []
    calls: dict[nn.Module, Any] = {}
    running: list[nn.Module] = []

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor.untyped_storage())
        if running and key not in seen:
            saved[running[-1]][key] = tensor.untyped_storage().nbytes()
        kept.append(tensor.detach())  # alive, or its address would be used again
        return tensor.detach()

    def enters(block: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(block)
        calls[block], saved[block] = (args, kwargs), {}
        entering = {storage_key(t.untyped_storage()): t for t in _tensors((args, kwargs))}
        input_bytes[block] = sum(
            t.untyped_storage().nbytes() for k, t in entering.items() if k not in seen
        )
        seen.update(entering)

    def leaves(block: nn.Module, *_: Any) -> None:
        seen.update(saved[block])
        running.pop()

    input_bytes: dict[nn.Module, int] = {}
    with _hooked(blocks, enters, leaves), torch.autograd.graph.saved_tensors_hooks(pack, _same):
        output = model(*inputs)
    del output
    if missing := [index for index, block in enumerate(blocks) if block not in calls]:
        raise ValueError(f"Block {missing[0]} did not run in this forward, so it has no costs.")
    return [BlockCost(input_bytes[b], sum(saved[b].values()), _flops(b, *calls[b])) for b in blocks]


def _owned(model: nn.Module) -> set[int]:
    return {storage_key(t.untyped_storage()) for t in [*model.parameters(), *model.buffers()]}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _hooked(
    blocks: Iterable[nn.Module], enters: Callable[..., None], leaves: Callable[..., None]
) -> Iterator[None]:
    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(enters, with_kwargs=True))
        handles.append(block.register_forward_hook(leaves))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flops(block: nn.Module, args: Any, kwargs: Any) -> int:
    tensors = [list(block.parameters()), args, kwargs]
    with FrozenStatistics(block), torch.no_grad(), fork_random_state(tensors):
        with FlopCounterMode(display=False) as counter:
            block(*args, **kwargs)
    return counter.get_total_flops()


check_public(globals())
