"""Which rows and positions a rank reads, in which micro-batches, and what a token weighs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from utils.parallel.dims import DATA_AXES, ParallelDims
from utils.parallel.mesh import ranks_along, sum_over

IGNORED = -100  # the target of a token that is not to be learned, as in F.cross_entropy

# Forward and backward of one step: inputs, targets and the weight of a token; the weighted loss.
Passes = Callable[[Tensor, Tensor, float], Tensor]


def local_rows(dims: ParallelDims, rank: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """A rank's rows of a global batch: equal parts, in the order of `ParallelDims.data_rank`.

    Ranks of one pipeline, tensor or context group read the same rows.

    Raises:
        ValueError: the rows do not divide over the ranks that read.
    """
    parts, place = dims.data_ranks, dims.data_rank(rank)
    for tensor in tensors:
        if len(tensor) % parts:
            raise ValueError(
                f"A batch of {len(tensor)} rows does not divide over {parts} ranks of data "
                f"({dims}). Take {len(tensor) // parts * parts or parts} rows."
            )
    return tuple(tensor.chunk(parts)[place] for tensor in tensors)


def local_pieces(place: int, ranks: int) -> tuple[int, int]:
    """Which two of the 2 * ranks pieces of a sequence a rank of cp holds.

    A late position attends to more than an early one. One piece from the front and its mirror from
    the back give all ranks the same work.
    """
    return place, 2 * ranks - 1 - place


def local_positions(dims: ParallelDims, rank: int, length: int) -> Tensor:
    """Positions (length / cp,) of every sequence that a rank holds, in the order it holds them.

    Raises:
        ValueError: the sequence does not divide into two pieces for every rank of cp.
    """
    if dims.cp == 1:
        return torch.arange(length)
    if length % (2 * dims.cp):
        above = -(-length // (2 * dims.cp)) * 2 * dims.cp
        raise ValueError(
            f"A sequence of {length} tokens does not divide into two pieces for each of {dims.cp} "
            f"ranks of context parallelism. Take a multiple of {2 * dims.cp}, such as {above}."
        )
    pieces = torch.arange(length).chunk(2 * dims.cp)
    return torch.cat([pieces[i] for i in local_pieces(dims.coordinates(rank)["cp"], dims.cp)])


def local_batches(
    batch: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    dims: ParallelDims,
    positions: Tensor,
    first: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of each step's inputs and targets, on the device of its `positions`.

    Args:
        batch: gives the inputs and targets (rows, S) of all ranks, the same on every rank.
        steps: the last one, not included, counted from 0.
        dims: who reads what.
        positions: `local_positions` of this rank.
        first: the step to begin with, where earlier ones are done.
    """
    for step in range(first, steps):
        inputs, targets = local_rows(dims, dist.get_rank(), *batch(step))
        place = positions.to(inputs.device)
        yield inputs[:, place].to(positions.device), targets[:, place].to(positions.device)


def token_weight(targets: Tensor, mesh: DeviceMesh) -> float:
    """What one token's loss is multiplied by, so that every token of the step counts alike.

    A mean of means does not do that where micro-batches or ranks hold unequal numbers of targets
    (https://github.com/huggingface/transformers/pull/34191). FSDP2 averages gradients over its
    ranks, so the weight is that number of ranks, over all tokens of the step.

    Args:
        targets: this rank's, of all micro-batches of the step.
        mesh: where FSDP2 shards and replicates.

    Raises:
        ValueError: no rank has a target.
    """
    tokens = sum_over(mesh, DATA_AXES, (targets != IGNORED).sum()).item()
    if not tokens:
        raise ValueError("No rank has a token to learn from: all targets of this step are masked.")
    return ranks_along(mesh, DATA_AXES) / tokens


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropies of (B, S, vocabulary) against (B, S), added up in float32 or finer.

    Under tensor parallelism the logits are a DTensor, each rank with those of some words; call it,
    and backward, inside `torch.distributed.tensor.parallel.loss_parallel()` then.
    """
    flat = logits.flatten(0, 1).to(loss_dtype(logits.dtype))
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def loss_dtype(computed: torch.dtype) -> torch.dtype:
    """In which losses of logits of that type are added up: float32, float64 for float64."""
    return torch.promote_types(computed, torch.float32)


def accumulated_passes(
    model: nn.Module,
    micro_batch: int,
    positions: Tensor,
    before_backward: Callable[[nn.Module, bool], None],
) -> Passes:
    """Forward and backward of a model without stages, one micro-batch after the other.

    Args:
        model: takes tokens (B, S) and gives logits (B, S, vocabulary).
        micro_batch: rows of a micro-batch, b.
        positions: (S,) of the tokens in their sequences.
        before_backward: called with the model and whether this is the step's last micro-batch;
            `shard.reduce_on_last_micro_batch` puts off what need not be sent for each.
    """

    def passes(inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        pieces = list(zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True))
        losses = []
        for number, (x, y) in enumerate(pieces, start=1):
            before_backward(model, number == len(pieces))
            loss = summed_loss(model(x, positions), y) * weight
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return passes
