"""What lab 14 runs on ranks: the learner's clip on gradients of three axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from utils.parallel.dims import ParallelDims
from utils.traffic.counter import traffic

BOX = ParallelDims(pp=2, shard=2, tp=2)
AXES = ("pp", "shard", "tp")
# Name and size of a gradient, and the axes along which other ranks hold the same one.
LAYER = (
    ("matrix", 60, ()),
    ("norm", 8, ("tp",)),
    ("tied matrix", 40, ("pp",)),
    ("gate", 1, ("shard", "tp")),
)
Gradient = tuple[Tensor, tuple[str, ...]]


class ClippingCase(NamedTuple):
    """One call of the learner's function.

    `limit` is in units of the norm; `empty_stage` has no gradients at all.
    """

    says: str
    limit: float
    empty_stage: int | None = None


CASES = (
    ClippingCase("a limit of half the norm", 0.5),
    ClippingCase("a limit of twice the norm", 2.0),
    ClippingCase("a limit that is the norm", 1.0),
    ClippingCase("a stage without gradients", 0.5, empty_stage=1),
)


class ClippingReport(NamedTuple):
    """One case on one rank: what was returned, and by how much the gradients were multiplied."""

    returned: Any
    scale: float
    is_in_place: bool
    calls: int


def gradients(rank: int, case: ClippingCase) -> list[Gradient]:
    """A rank's gradients: copies are alike on the ranks that share them."""
    place, found = BOX.coordinates(rank), []
    if place["pp"] == case.empty_stage:
        return []
    for number, (_, size, copied) in enumerate(LAYER):
        if case.empty_stage is not None and "pp" in copied:
            copied = ()
        own = [place[axis] + 1 if axis not in copied else 0 for axis in AXES]
        seed = number + 10 * own[0] + 100 * own[1] + 1000 * own[2]
        random = torch.Generator().manual_seed(seed)
        found.append((torch.randn(size, generator=random, dtype=torch.float64), tuple(copied)))
    return found


def norm(
    case: ClippingCase, *, over: tuple[str, ...] = AXES, rank: int = 0, once: bool = True
) -> float:
    """The norm over some axes, of copies one; or all of them, as a wrong rule has it."""
    square, whole = 0.0, BOX.coordinates(rank)
    for other in BOX.group(rank, *over):
        place = BOX.coordinates(other)
        for tensor, copied in gradients(other, case):
            first = all(place[axis] == 0 for axis in copied if axis in over)
            square += float(tensor.square().sum()) * (first or not once)
    return square**0.5 if whole else 0.0


def clipped(clip: Callable[..., Any]) -> list[ClippingReport]:
    """On every rank: all cases through the learner's function."""
    found = []
    for case in CASES:
        mine = gradients(dist.get_rank(), case)
        before = [tensor.clone() for tensor, _ in mine]
        place = {axis: BOX.coordinates(dist.get_rank())[axis] for axis in AXES}
        with traffic() as sent:
            returned = clip(mine, place, case.limit * norm(case))
        ratios = [float((t / b).mean()) for (t, _), b in zip(mine, before, strict=True)]
        even = all(
            torch.allclose(t, b * ratios[0], rtol=1e-9)
            for (t, _), b in zip(mine, before, strict=True)
        )
        returned = returned.item() if isinstance(returned, Tensor) else returned
        calls = sum(row.calls for row in sent.rows)
        found.append(ClippingReport(returned, ratios[0] if ratios else 1.0, even, calls))
    return found
