"""Context parallelism: each rank holds a part of every sequence, attention included.

A query needs the keys and values of all earlier positions. Here each rank gathers them and attends
with its own queries, as in Llama 3 (arXiv:2407.21783, section 3.3.2). All other layers look at one
position at a time and need nothing from other ranks.

Which positions a rank holds is `data.local_positions`'s choice.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from utils.parallel.data import local_pieces
from utils.parallel.model_parts import part_blocks


def apply_cp(part: nn.Module, mesh: DeviceMesh) -> None:
    """Let the attention of every block reach over the one axis of `mesh`, in place.

    Give the model the tokens at `data.local_positions`, and these positions.
    """
    for block in part_blocks(part):
        block.attention.attend = functools.partial(gathered_attention, mesh=mesh)


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Causal attention (B, A, S / ranks, D) of this rank's queries to the keys of all ranks.

    Keys and values, (B, K, S / ranks, D), are gathered forward; their gradients are added up and
    scattered backward.
    """
    place, ranks = mesh.get_local_rank(), mesh.size()
    keys, values = (_in_order(_gather(tensor, mesh), ranks) for tensor in (key, value))
    mixed = [
        _attend(piece, keys, values, number * piece.shape[2])
        for piece, number in zip(query.chunk(2, dim=2), local_pieces(place, ranks), strict=True)
    ]
    return torch.cat(mixed, dim=2)


def _attend(query: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Queries at positions from `first` on, to the keys up to each one's own position."""
    length = query.shape[2]
    end, grouped = first + length, keys.shape[1] != query.shape[1]
    mask = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(first)
    return F.scaled_dot_product_attention(
        query, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=grouped
    )


def _gather(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """(B, K, S / ranks, D) of each rank -> (B, K, S, D), rank after rank."""
    whole = DTensor.from_local(tensor, mesh, [Shard(2)], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _in_order(tensor: Tensor, ranks: int) -> Tensor:
    """Pieces as the ranks hold them -> pieces in the order of positions."""
    pieces = tensor.chunk(2 * ranks, dim=2)
    held = [number for place in range(ranks) for number in local_pieces(place, ranks)]
    return torch.cat([pieces[held.index(number)] for number in range(2 * ranks)], dim=2)
