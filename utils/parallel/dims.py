"""The axes along which training is divided over ranks: their names, sizes and order.

Plans, device meshes, simulated worlds and exported scripts all take them from here. No torch.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

# Slowest first: neighbouring ranks share a tensor-parallel group, so that it stays inside a node.
AXES = ("pp", "replicate", "shard", "cp", "tp")
# Ranks that differ in one of these read other rows of the batch.
DATA_AXES = ("replicate", "shard")
# Ranks that differ in one of these hold the same parameters, so that gradients are added over them.
STATE_AXES = (*DATA_AXES, "cp")


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """How many ranks there are along each axis.

    Attributes:
        pp: Pipeline stages: ranks that hold other layers.
        replicate: Replicas that hold the same states and read other rows (DDP, and the groups of
            HSDP).
        shard: Ranks that share states and read other rows (ZeRO, FSDP).
        cp: Ranks that share each sequence (context parallelism).
        tp: Ranks that share each matrix (tensor parallelism).
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that are no counts. Raises ValueError naming the axis."""
        for axis in AXES:
            size = getattr(self, axis)
            if not _is_count(size):
                raise ValueError(f"{axis} is {size!r}; write a whole number, 1 or more.")

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along every axis, slowest axis first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def ranks(self) -> int:
        """Ranks in all: the product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Parts into which the rows of a batch are divided, dp: replicate * shard."""
        return self.replicate * self.shard

    @property
    def mesh(self) -> dict[str, int]:
        """Axes of a device mesh, slowest first: those above 1, and "shard", which FSDP2 needs."""
        return {axis: n for axis, n in self.sizes.items() if n > 1 or axis == "shard"}

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place along every axis.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is outside: {self} has ranks 0 to {self.ranks - 1}.")
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return {axis: places[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at a place; an axis that is left out counts as 0.

        Raises:
            ValueError: there is no such axis, or the place is outside of it.
        """
        for axis, place in coordinates.items():
            _check_axis(axis)
            if not 0 <= place < getattr(self, axis):
                raise ValueError(
                    f"{axis} is {place}, and {self} has places 0 to {getattr(self, axis) - 1} there."
                )
        found = 0
        for axis in AXES:
            found = found * getattr(self, axis) + coordinates.get(axis, 0)
        return found

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` alone, itself included, in order.

        Raises:
            ValueError: there is no such rank or axis.
        """
        for axis in axes:
            _check_axis(axis)
        fixed = {a: n for a, n in self.coordinates(rank).items() if a not in axes}
        places = [{}]
        for axis in (a for a in AXES if a in axes):
            places = [{**p, axis: i} for p in places for i in range(getattr(self, axis))]
        return tuple(self.rank(**fixed, **place) for place in places)

    def data_rank(self, rank: int) -> int:
        """Which part of the batch's rows a rank reads, from 0 to data_ranks - 1."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    def with_cp_in(self, axis: str) -> ParallelDims:
        """The same ranks with cp counted along a data axis, as FSDP2 sees them.

        Ranks that share a sequence hold the same states. They are more ranks to shard over
        ("shard"), or, where nothing is sharded, more replicas ("replicate").

        Raises:
            ValueError: another axis, or "replicate" where states are sharded.
        """
        if axis not in DATA_AXES:
            raise ValueError(f"cp cannot be counted along {axis!r}; write 'shard' or 'replicate'.")
        if axis == "replicate" and self.shard > 1 and self.cp > 1:
            raise ValueError(
                f"{self} shards states over {self.shard} ranks, and the ranks of cp lie inside of "
                "each such group: write 'shard'."
            )
        return replace(self, cp=1, **{axis: getattr(self, axis) * self.cp})

    def check_world(self, ranks: int) -> None:
        """Hold the sizes against the number of ranks that were started.

        Raises:
            ValueError: they do not multiply out to it.
        """
        if ranks != self.ranks:
            raise ValueError(
                f"{self} needs {self.ranks} ranks, and {ranks} {'is' if ranks == 1 else 'are'} "
                f"here. Start {self.ranks}, or change a size so that they multiply out to {ranks}."
            )

    def __str__(self) -> str:
        """Such as "pp 2 x shard 4": the axes above 1."""
        return " x ".join(f"{a} {n}" for a, n in self.sizes.items() if n > 1) or "one rank"


def _is_count(size: Any) -> bool:
    try:
        return not isinstance(size, bool) and operator.index(size) >= 1
    except TypeError:
        return False


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise ValueError(f"There is no axis {axis!r}; write one of {', '.join(map(repr, AXES))}.")
