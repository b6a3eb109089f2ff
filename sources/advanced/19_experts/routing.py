"""Routings by hand for lab 19: tables small enough to follow, and what is right for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Crowd(NamedTuple):
    """Rows that want to experts: `choice` and `probability` (T, k), and the room of an expert."""

    says: str
    choice: list[list[int]]
    probability: list[list[float]]
    experts: int
    capacity: int


def best_rows(crowd: Crowd) -> list[list[bool]]:
    """Which rows stay: for each expert the most probable, of equal ones the earlier token's."""
    rows = [
        (-p, token, slot, expert)
        for token, (chosen, probable) in enumerate(
            zip(crowd.choice, crowd.probability, strict=True)
        )
        for slot, (expert, p) in enumerate(zip(chosen, probable, strict=True))
    ]
    return _kept(crowd, sorted(rows))


def first_rows(crowd: Crowd) -> list[list[bool]]:
    """A mistake: the first to come stay."""
    rows = [
        (0.0, token, slot, expert)
        for token, chosen in enumerate(crowd.choice)
        for slot, expert in enumerate(chosen)
    ]
    return _kept(crowd, rows)


def rows_by_slot(crowd: Crowd) -> list[list[bool]]:
    """A mistake: first and second choices have a room each."""
    kept = [[False] * len(chosen) for chosen in crowd.choice]
    for slot in range(len(crowd.choice[0])):
        one = crowd._replace(
            choice=[[chosen[slot]] for chosen in crowd.choice],
            probability=[[p[slot]] for p in crowd.probability],
        )
        for token, (stays,) in enumerate(best_rows(one)):
            kept[token][slot] = stays
    return kept


def _kept(crowd: Crowd, rows: list[tuple[float, int, int, int]]) -> list[list[bool]]:
    kept, taken = [[False] * len(chosen) for chosen in crowd.choice], [0] * crowd.experts
    for _, token, slot, expert in rows:
        if taken[expert] < crowd.capacity:
            kept[token][slot] = True
            taken[expert] += 1
    return kept


def _drawn(seed: int, tokens: int, k: int, experts: int, capacity: int) -> Crowd:
    torch.manual_seed(seed)
    probability, choice = torch.randn(tokens, experts).mul(2).softmax(-1).topk(k)
    said = f"{tokens} tokens, {k} of {experts} experts, room for {capacity}"
    return Crowd(said, choice.tolist(), probability.tolist(), experts, capacity)


CROWDS = (
    Crowd(
        "five tokens, one choice each, room for 2",
        [[0], [0], [0], [0], [1]],
        [[0.7], [0.5], [0.9], [0.6], [0.6]],
        2,
        2,
    ),
    Crowd(
        "first and second choices meet at an expert",
        [[0, 1], [1, 0], [1, 0]],
        [[0.6, 0.4], [0.8, 0.2], [0.5, 0.45]],
        2,
        2,
    ),
    _drawn(0, 24, 2, 4, 9),
    _drawn(1, 40, 3, 8, 15),
    Crowd("three rows equally probable, room for 2", [[1], [1], [1]], [[0.5], [0.5], [0.5]], 3, 2),
    Crowd("room for all", [[0], [0]], [[0.5], [0.6]], 2, 5),
    Crowd("room for none", [[0], [1]], [[0.5], [0.6]], 2, 0),
)


class Trip(NamedTuple):
    """Tokens of a rank on node `here`: `choice` (T, k), and how experts lie."""

    says: str
    choice: list[list[int]]
    experts: int
    ranks: int
    ranks_per_node: int
    here: int


def nodes_of(trip: Trip) -> list[list[int]]:
    """The node of every row."""
    per_node = trip.experts // trip.ranks * trip.ranks_per_node
    return [[expert // per_node for expert in chosen] for chosen in trip.choice]


def network_rows(trip: Trip, once_per_node: bool) -> int:
    """Rows that leave the node."""
    counted = [set(nodes) if once_per_node else nodes for nodes in nodes_of(trip)]
    return sum(node != trip.here for nodes in counted for node in nodes)


def _far(
    seed: int, tokens: int, k: int, experts: int, ranks: int, per_node: int, here: int
) -> Trip:
    torch.manual_seed(seed)
    choice = torch.rand(tokens, experts).topk(k).indices.tolist()
    says = (
        f"{tokens} tokens, {k} of {experts} experts, {ranks} ranks, {per_node} a node, node {here}"
    )
    return Trip(says, choice, experts, ranks, per_node, here)


TRIPS = (
    Trip(
        "one token, experts 0, 8, 9, 11, 13 of 16, 8 ranks, 4 a node, node 0",
        [[0, 8, 9, 11, 13]],
        16,
        8,
        4,
        0,
    ),
    _far(0, 5, 3, 16, 8, 4, 1),
    _far(1, 64, 8, 64, 32, 8, 2),
    _far(2, 20, 2, 8, 8, 8, 0),
)


# --- runs for the diagnosis ----------------------------------------------------------------------

RANKS, EXPERTS, K, H = 4, 8, 2, 16
FAULT_OF = {"A": 1, "B": 3, "C": 2, "D": 0}  # of `checks.FAULTS`


class Observed(NamedTuple):
    """What a run of 200 steps reports.

    Attributes:
        load: the busiest expert's rows over the mean, all ranks together, every 40 steps.
        bias_of_expert_0: on each rank at the end.
        moved: how far outputs' weights move when one number is added to all biases, as a share.
    """

    load: list[float]
    bias_of_expert_0: list[float]
    moved: float


def observed(run: str) -> Observed:
    """Router and bias on four ranks' tokens, which differ by rank; the router itself is not trained."""
    fault = FAULT_OF[run]
    draw = torch.Generator().manual_seed(3)
    router = torch.randn(H, EXPERTS, generator=draw) * 0.5
    centres = torch.randn(RANKS, 1, H, generator=draw) * 0.4
    biases = torch.zeros(RANKS, EXPERTS)
    load, p = [], torch.zeros(0)
    for step in range(201):
        x = torch.randn(RANKS, 256, H, generator=draw) + centres
        p = (x @ router).softmax(-1)
        choice = (p + biases[:, None]).topk(K).indices
        rows = torch.stack([own.flatten().bincount(minlength=EXPERTS) for own in choice]).float()
        total = rows.sum(0)
        if step % 40 == 0:
            load.append((total.max() / total.mean()).item())
        seen = rows if fault == 3 else total.expand(RANKS, EXPERTS)
        sign = -1 if fault == 1 else 1
        biases = biases + sign * 0.002 * (seen.mean(-1, keepdim=True) - seen).sign()
    return Observed(load, biases[:, 0].tolist(), _moved(p[0], biases[0], fault == 2))


def _moved(p: Tensor, bias: Tensor, is_in_weights: bool) -> float:
    """Weights before and after one number is added to all biases: choices stay."""
    weights = []
    for all_of_it in (bias, bias + 0.5):
        choice = (p + all_of_it).topk(K).indices
        weight = (p + all_of_it * is_in_weights).gather(-1, choice)
        weights.append(weight / weight.sum(-1, keepdim=True))
    return ((weights[1] - weights[0]).norm() / weights[0].norm()).item()
