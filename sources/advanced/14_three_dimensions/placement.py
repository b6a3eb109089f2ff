"""Ranks on nodes: in which order the axes number them, and which bytes leave a node.

A layout is a row of factors, slowest first, as `ParallelDims` numbers ranks. An axis may have
several: dp 4 as ("dp", 2), ("pp", 4), ("dp", 2) has pairs of its ranks in a node, and the rest of
its ring between nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from utils.checked import check_public

__all__ = ["axis_sizes", "busiest_port_bytes", "crossing_bytes", "layouts", "places"]

Factor = tuple[str, int]
CHAINS = ("pp",)  # axes whose last rank does not send to the first


def places(layout: Sequence[Factor]) -> list[dict[str, int]]:
    """The place of every rank along every axis, in the order of ranks."""
    found = []
    for rank in range(math.prod(size for _, size in layout)):
        place: dict[str, int] = {}
        scale: dict[str, int] = {}
        for axis, size in reversed(layout):
            rank, digit = divmod(rank, size)
            place[axis] = place.get(axis, 0) + digit * scale.get(axis, 1)
            scale[axis] = scale.get(axis, 1) * size
        found.append(place)
    return found


def crossing_bytes(
    layout: Sequence[Factor], sent: Mapping[str, float], gpus_per_node: int
) -> dict[str, float]:
    """Bytes of a step that leave a node, by axis, over all ranks.

    Args:
        layout: factors, slowest first.
        sent: by axis, what a rank of a ring sends to the next one in a step; along "pp" what two
            neighbouring stages send each other, both directions together.
        gpus_per_node: ranks of one node.

    Raises:
        ValueError: the ranks do not fill whole nodes, or an axis has no bytes.
    """
    ranks, sizes = places(layout), axis_sizes(layout)
    if len(ranks) % gpus_per_node:
        raise ValueError(
            f"{len(ranks)} ranks do not fill nodes of {gpus_per_node}. Change a size so that "
            f"{gpus_per_node} divides their product."
        )
    if missing := sizes.keys() - sent.keys():
        raise ValueError(f"sent has no bytes for {', '.join(sorted(missing))}: give 0 for none.")
    left = dict.fromkeys(sizes, 0.0)
    for axis, _, _ in _hops_between_nodes(layout, gpus_per_node):
        left[axis] += sent[axis]
    return left


def busiest_port_bytes(
    layout: Sequence[Factor], sent: Mapping[str, float], gpus_per_node: int
) -> float:
    """Bytes of a step that leave a node by the port that sends most; 0 where none leave.

    A rank has a port of its own. Of what two stages send each other, half goes either way.

    Args:
        layout, sent, gpus_per_node: as `crossing_bytes` takes them.
    """
    ports = [0.0] * len(places(layout))
    for axis, sender, receiver in _hops_between_nodes(layout, gpus_per_node):
        ports[sender] += sent[axis] / 2 if axis in CHAINS else sent[axis]
        ports[receiver] += sent[axis] / 2 if axis in CHAINS else 0.0
    return max(ports)


def _hops_between_nodes(
    layout: Sequence[Factor], gpus_per_node: int
) -> Iterator[tuple[str, int, int]]:
    """Axis, sender and receiver of each hop that leaves a node."""
    ranks, sizes = places(layout), axis_sizes(layout)
    number = {tuple(sorted(place.items())): rank for rank, place in enumerate(ranks)}
    for rank, place in enumerate(ranks):
        for axis, size in sizes.items():
            if axis in CHAINS and place[axis] == size - 1:
                continue
            neighbour = {**place, axis: (place[axis] + 1) % size}
            other = number[tuple(sorted(neighbour.items()))]
            if other // gpus_per_node != rank // gpus_per_node:
                yield axis, rank, other


def axis_sizes(layout: Sequence[Factor]) -> dict[str, int]:
    """Ranks along every axis: the product of its factors, in the order of first appearance."""
    sizes: dict[str, int] = {}
    for axis, size in layout:
        sizes[axis] = sizes.get(axis, 1) * size
    return sizes


def layouts(sizes: Mapping[str, int]) -> Iterator[tuple[Factor, ...]]:
    """Every order of the prime factors of all axes."""
    factors = [(axis, p) for axis, size in sizes.items() for p in _primes(size)]
    yield from sorted(set(itertools.permutations(factors)))


def _primes(size: int) -> list[int]:
    found, divisor = [], 2
    while size > 1:
        while size % divisor == 0:
            found.append(divisor)
            size //= divisor
        divisor += 1
    return found


check_public(globals())
