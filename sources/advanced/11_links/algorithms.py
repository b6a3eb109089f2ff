"""Collectives made of messages: rings, trees, a rotation, and a ring within rings.

Patarasuk and Yuan 2009 (ring all-reduce, bandwidth-optimal); Thakur, Rabenseifner and Gropp 2005
(binomial trees, pairwise exchange). With N ranks and a tensor of B bytes on each, a rank sends

    ring all-reduce       2 (N - 1) / N x B   in 2 (N - 1) steps
    ring reduce-scatter     (N - 1) / N x B   in N - 1 steps
    ring all-gather         (N - 1) x B       in N - 1 steps (B: its shard)
    rotation all-to-all     (N - 1) / N x B   in N - 1 steps
    tree all-reduce       B to its parent and B to each child   in 2 log2 N steps, rounded up
"""

from __future__ import annotations

import torch
from torch import Tensor

from .wire import Wire


def ring_reduce_scatter(wire: Wire, tensor: Tensor) -> Tensor:
    """The sum over all ranks of this rank's part of `tensor`, which is overwritten.

    Parts are those of `torch.tensor_split` along dim 0; they may differ in length by one. Rank r
    ends with part r.
    """
    parts, right, left = _parts(wire, tensor), *_neighbours(wire)
    for step in range(1, wire.size):
        out, into = (wire.rank - step) % wire.size, (wire.rank - step - 1) % wire.size
        parts[into] += wire.exchange(parts[out], right, left, like=parts[into])
    return parts[wire.rank]


def ring_gather_parts(wire: Wire, tensor: Tensor) -> Tensor:
    """Fill in the other parts of `tensor`, of which each rank holds its own, in place."""
    parts, right, left = _parts(wire, tensor), *_neighbours(wire)
    for step in range(wire.size - 1):
        out, into = (wire.rank - step) % wire.size, (wire.rank - step - 1) % wire.size
        parts[into].copy_(wire.exchange(parts[out], right, left, like=parts[into]))
    return tensor


def ring_all_reduce(wire: Wire, tensor: Tensor) -> Tensor:
    """The sum of `tensor` over all ranks, in place: a reduce-scatter, then an all-gather."""
    if wire.size > 1:
        ring_reduce_scatter(wire, tensor)
        ring_gather_parts(wire, tensor)
    return tensor


def ring_all_gather(wire: Wire, shard: Tensor) -> Tensor:
    """The shards of all ranks, (S, ...) each, one after the other: (N x S, ...)."""
    whole = shard.new_empty((wire.size * len(shard), *shard.shape[1:]))
    _parts(wire, whole)[wire.rank].copy_(shard)
    return ring_gather_parts(wire, whole)


def all_to_all(wire: Wire, tensor: Tensor) -> Tensor:
    """Part i of `tensor` goes to rank i; rank j's comes to place j.

    Raises:
        ValueError: the rows do not divide over the ranks.
    """
    if len(tensor) % wire.size:
        raise ValueError(
            f"{len(tensor)} rows do not divide over {wire.size} ranks: all-to-all gives each rank "
            f"as many. Take a multiple of {wire.size}."
        )
    result = torch.empty_like(tensor)
    mine, theirs = _parts(wire, tensor), _parts(wire, result)
    theirs[wire.rank].copy_(mine[wire.rank])
    for step in range(1, wire.size):
        to, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        theirs[source].copy_(wire.exchange(mine[to], to, source))
    return result


def tree_reduce(wire: Wire, tensor: Tensor) -> Tensor:
    """The sum over all ranks on rank 0, in place, up a binomial tree; elsewhere partial sums."""
    distance = 1 << max(0, (wire.size - 1).bit_length() - 1)
    while distance:
        if distance <= wire.rank < 2 * distance:
            wire.send(tensor, wire.rank - distance)
        elif wire.rank < distance and wire.rank + distance < wire.size:
            tensor += wire.receive(tensor, wire.rank + distance)
        distance //= 2
    return tensor


def tree_broadcast(wire: Wire, tensor: Tensor) -> Tensor:
    """Rank 0's tensor on all ranks, in place: in each step, twice as many have it."""
    distance = 1
    while distance < wire.size:
        if wire.rank < distance and wire.rank + distance < wire.size:
            wire.send(tensor, wire.rank + distance)
        elif distance <= wire.rank < 2 * distance:
            tensor.copy_(wire.receive(tensor, wire.rank - distance))
        distance *= 2
    return tensor


def tree_all_reduce(wire: Wire, tensor: Tensor) -> Tensor:
    """The sum over all ranks, in place: up the tree, and down again."""
    return tree_broadcast(wire, tree_reduce(wire, tensor))


def hierarchical_all_reduce(wire: Wire, tensor: Tensor) -> Tensor:
    """The sum over all ranks of all hosts, in place, sending little between hosts.

    Ranks of a host reduce-scatter; those with the same place on every host all-reduce their part;
    ranks of a host all-gather.
    """
    per_host = wire.size // wire.hosts
    host, place = divmod(wire.rank, per_host)
    inside = wire.among(range(host * per_host, (host + 1) * per_host))
    across = wire.among(range(place, wire.size, per_host))
    part = ring_reduce_scatter(inside, tensor)
    ring_all_reduce(across, part)
    return ring_gather_parts(inside, tensor)


def _parts(wire: Wire, tensor: Tensor) -> list[Tensor]:
    return list(tensor.tensor_split(wire.size))


def _neighbours(wire: Wire) -> tuple[int, int]:
    return (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
