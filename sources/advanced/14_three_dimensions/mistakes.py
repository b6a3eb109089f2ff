"""Answers to the exercises of lab 14 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from utils.labs.mistakes import KnownAnswers

from .placement import crossing_bytes, layouts

known = KnownAnswers()
known.rights("same_rows", a_set={5, 4, 1, 0})
known.mistakes("turning_point", half=(908, "two replicas"), a_hundred=(100, "Let m vary"))
known.rights("turning_point", rounded=1820)


def least_of(rows: Any, sent: Any, per_node: int) -> Any:
    return min(rows, key=lambda row: sum(crossing_bytes(row, sent, per_node).values()))


def by_order(sizes: Any, sent: Any, per_node: int) -> Any:
    """The best order of whole axes."""
    if math.prod(sizes.values()) > 100:
        return list(sizes.items())
    return least_of(itertools.permutations(sizes.items()), sent, per_node)


def all_rings(solution: Any, sizes: Any, sent: Any, per_node: int) -> Any:
    """The solution, with stages in a ring like every other axis."""
    renamed = {f"{axis} ring": n for axis, n in sizes.items()}
    found = solution(renamed, {f"{axis} ring": gb for axis, gb in sent.items()}, per_node)
    return [(axis.removesuffix(" ring"), n) for axis, n in found]


known.mistakes(
    "place_axes",
    rings_alone=(all_rings, "of n stages n - 1 send"),
    the_wrong_way_round=(lambda sizes, sent, n: list(sizes.items())[::-1], "slowest first"),
    other_ranks=(lambda sizes, sent, n: [("tp", 8)], "multiply out"),
    names_alone=(lambda sizes, sent, n: list(sizes), "list of pairs"),
    nothing=(lambda sizes, sent, n: None, "list of pairs"),
    whole_axes=(by_order, "two places"),
)


@known.right("place_axes")
def by_brute_force(solution: Any, sizes: Any, sent: Any, per_node: int) -> Any:
    """Small clusters by all layouts, in numpy's numbers."""
    if math.prod(sizes.values()) > 100:
        return solution(sizes, sent, per_node)
    return [(axis, np.int64(n)) for axis, n in least_of(layouts(sizes), sent, per_node)]


def clip(
    once: bool = True,
    roots: bool = False,
    each: bool = False,
    up: bool = False,
    leave: bool = False,
    copy: bool = False,
    squared: bool = False,
    local: bool = False,
) -> Callable[..., float]:
    """A clip by the norm over all ranks, with a part done otherwise."""

    def clip_over_axes(gradients: Any, place: dict[str, int], limit: float) -> float:
        if leave and not gradients:
            return 0.0
        square = torch.zeros((), dtype=torch.float64)
        for tensor, copied in gradients:
            if not once or all(place[axis] == 0 for axis in copied):
                part = tensor.square().sum()
                square += part.sqrt() if roots else part
        if not local:
            dist.all_reduce(square)
        for _ in range(3 * each):
            dist.all_reduce(torch.zeros(1))
        norm = (square if roots or squared else square.sqrt()).item()
        norm_or_tiny = max(norm, 1e-30)  # of a stage without gradients, by itself
        scale = limit / norm_or_tiny if up else min(1.0, limit / norm_or_tiny)
        for tensor, _ in gradients:
            if not copy:
                tensor *= scale
        return norm

    return clip_over_axes


def clip_of_stage(gradients: Any, place: dict[str, int], limit: float) -> float:
    square = torch.zeros(2, dtype=torch.float64)
    square[place["pp"]] = sum(
        t.square().sum()
        for t, axes in gradients
        if all(place[axis] == 0 for axis in axes if axis != "pp")
    )
    dist.all_reduce(square)
    norm = square[place["pp"]].sqrt().item()
    for tensor, _ in gradients:
        tensor *= min(1.0, limit / norm)
    return norm


known.mistakes(
    "clip_over_axes",
    counted_on_every_rank=(clip(once=False), "on every rank that has one"),
    own_norm=(clip(local=True), "this rank's own norm"),
    up=(clip(up=True), "only where the norm is above"),
    of_its_stage=(clip_of_stage, "Add up over pp as well"),
    sum_of_roots=(clip(roots=True), "the root comes last"),
    no_root=(clip(squared=True), "its square"),
    a_copy=(clip(copy=True), "in place"),
    a_call_for_each=(clip(each=True), "one number is enough"),
)
known.mistakes(
    "clip_over_axes",
    timeout_seconds=6.0,
    leaves_without_gradients=(clip(leave=True), "list of gradients is empty"),
)
known.mistakes(
    "two_faults",
    tp_in_a=({"A: axis": "tp"}, "one along the others"),
    loss_right_in_a=({"A: fault": 5}, "leaves the loss of step 1 right"),
    loss_wrong_in_b=({"B: fault": 6}, "leave the loss of step 1 right"),
    one_rank_in_b=({"B: fault": 4}, "more than one rank along that axis"),
)
known.mistakes(
    "deal_layers",
    equal_stages=(lambda n, p, *rest: [n // p] * p, "is possible"),
    all_on_the_first=(lambda n, p, *rest: [n] + [0] * (p - 1), "at least 1"),
    too_few=(lambda n, p, *rest: [n], "One number a stage"),
    no_list=(lambda *given: 3, "whole number for each"),
)
