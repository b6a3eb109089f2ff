"""Split a whole model over the ranks of a group with the layers of `tensor_layers`."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checked import check_public
from utils.parallel.model_parts import Part, part_blocks
from utils.parallel.tensor_shares import (
    HEAD_LAYERS,
    check_heads,
    check_width,
    check_words,
    copies_of_head,
    own_head_rows,
)

from .tensor_layers import SharedGradients, Split, columns, one_column, rows, word_vectors

__all__ = ["split_layers"]


def split_layers(
    part: Part, group: dist.ProcessGroup | None = None, *, sequence_dim: int | None = None
) -> SharedGradients:
    """Split a model or stage over the ranks of a group, in place; every rank starts from the whole.

    Its logits, (..., V / ranks), are for `vocabulary_cross_entropy`.

    Args:
        part: has `blocks` and may have `embed`, `norm` and `head`, as `Transformer` does.
        group: the ranks; None for all.
        sequence_dim: dimension of the sequence, to split it between the matrices as well: 1 for
            (B, S, H), 0 for (S, B, H).

    Returns:
        What to add up after the last backward of a step.

    Raises:
        ValueError: heads, channels or words do not divide over the ranks.
    """
    split = Split(group, sequence_dim)
    copied, whole, copies = [], [], 1
    for block in part_blocks(part):
        copies = copies_of_head(block.attention, split.ranks)
        copied += _split_attention(block.attention, split)
        whole += _split_feedforward(block.feedforward, split)
        whole += [
            p
            for name in ("attention_norm", "feedforward_norm")
            for p in getattr(block, name).parameters()
        ]
        if block.attention.output.bias is not None:
            whole.append(block.attention.output.bias)
    whole += _split_ends(part, split)
    shared = SharedGradients()
    if split.sequence_dim is not None:
        shared.over.append((group, whole))
    if copied:
        shared.over.append((_group_of_copies(split, copies), copied))
    return shared


def _split_attention(attention: Any, split: Split) -> list[nn.Parameter]:
    """Gives the parameters of copied key-value heads."""
    check_heads(attention, split.ranks)
    copies = copies_of_head(attention, split.ranks)
    own = {name: own_head_rows(attention, name, split.place, split.ranks) for name in HEAD_LAYERS}
    linears = [getattr(attention, name) for name in HEAD_LAYERS]
    for linear, mine in zip(linears, own.values(), strict=True):
        _keep_outputs(linear, mine)
    _keep_inputs(attention.output, own["query"])
    attention.project = partial(columns, linears, split)
    attention.output.forward = partial(rows, attention.output, split)
    if copies == 1:
        return []
    return [p for linear in linears[1:] for p in linear.parameters()]


def _split_feedforward(feedforward: Any, split: Split) -> list[nn.Parameter]:
    """Gives the bias that is added after the sum."""
    names = [name for name in ("gate", "up") if hasattr(feedforward, name)]
    linears = [getattr(feedforward, name) for name in names]
    for name, linear in zip(names, linears, strict=True):
        check_width(linear, linear.out_features, name, split.ranks)
        _keep_outputs(linear, _part(linear.out_features, split))
    _keep_inputs(feedforward.down, _part(feedforward.down.in_features, split))
    feedforward.open = partial(columns, linears, split)
    feedforward.down.forward = partial(rows, feedforward.down, split)
    return [] if feedforward.down.bias is None else [feedforward.down.bias]


def _split_ends(part: Part, split: Split) -> list[nn.Parameter]:
    """Gives the parameters of the last norm."""
    embed, head = part.embed, part.head
    tied = embed is not None and head is not None and head.weight is embed.weight
    if embed is not None:
        check_words(embed.num_embeddings, split.ranks)
        embed.weight = _parameter(embed.weight[_part(embed.num_embeddings, split)])
        embed.forward = partial(word_vectors, embed, split)
    if head is not None:
        check_words(head.out_features, split.ranks)
        _keep_outputs(head, _part(head.out_features, split))
        head.forward = partial(one_column, head, split)
    if embed is not None and head is not None and tied:
        head.weight = embed.weight
    return [] if part.norm is None else list(part.norm.parameters())


def _group_of_copies(split: Split, copies: int) -> dist.ProcessGroup:
    """The neighbours that hold the same key-value head."""
    first = split.place // copies * copies
    members = dist.get_process_group_ranks(split.group or dist.group.WORLD)
    group = dist.new_group(
        members[first : first + copies], use_local_synchronization=True, group_desc="copies"
    )
    return cast("dist.ProcessGroup", group)  # this rank is a member


def _part(size: int, split: Split) -> slice:
    return slice(split.place * size // split.ranks, (split.place + 1) * size // split.ranks)


def _keep_outputs(linear: nn.Linear, own: slice) -> None:
    linear.weight = _parameter(linear.weight[own])
    linear.out_features = linear.weight.shape[0]
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias[own])


def _keep_inputs(linear: nn.Linear, own: slice) -> None:
    linear.weight = _parameter(linear.weight[:, own])
    linear.in_features = linear.weight.shape[1]


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format))


check_public(globals())
