"""Checks of lesson and lab 14, "Three dimensions at once"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from utils.labs.cases import Question, judge, scored, takes
from utils.labs.checking import starts_ranks
from utils.labs.kinds import Kind, WrongKind, equal, function, keys, number, text, whole
from utils.labs.verdict import Verdict, correct, not_yet, shown
from utils.ranks import RankError, run_ranks

from . import workers
from .placement import CHAINS, axis_sizes, crossing_bytes

TIMEOUT_SECONDS = 20.0
MOST_TRIED = 512  # ranks of a cluster whose orders a nudge compares


def _read_ranks(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (set, frozenset, list, tuple, range)):
        raise WrongKind("Write a set, such as {0, 5}.")
    return tuple(sorted({whole().read(rank) for rank in value}))


same_rows = Question(
    "Lesson 14: the ranks that read the same rows as rank 5 of pp 2 x shard 2 x tp 2.",
    Kind("a set of ranks", _read_ranks),
    right=(0, 1, 4, 5),
    wrong={
        (
            4,
            5,
        ): "Those share its matrices. Which rows does the first stage read, whose output they work on?",
        (1, 5): "Those are its pipeline. What of the other slices of the same matrices?",
        (5, 7): "Those are two replicas: they are the ones that read other rows.",
        (1, 4, 5): "Nearly: what of the first stage's other slice?",
    },
    nudge="Rows differ along one axis alone. Take all ranks that have rank 5's place along it.",
    note="all stages and slices of one replica",
    expected="ranks",
)

which_bug = Question(
    "Lesson 14: the first loss is right, and all stages agree on a wrong norm.",
    number("1, 2, 3 or 4"),
    right=3,
    wrong={
        1: "With a norm by stage the stages report different norms.",
        2: "Other rows show at step 1: the first loss is already of something else.",
        4: "The mean of means is another number already at step 1.",
    },
    nudge="Which of the four leaves the first forward pass alone, and the gradients not?",
    note="both copies start alike, and each has a part of the gradient",
    expected="a number",
)

_STREAM = 2048 * 10_240 * 2 / 4  # bytes of a micro-batch that a slice of 4 sends to the next stage
_STAGE = 10 * (4 * 10_240**2 + 3 * 10_240 * 27_648) / 4  # parameters of a rank, but for the norms
# Of 56 ranks that have a next stage, 24 have it in their node where stages lie side by side.
_TURN = 2 * (64 * 0.5 * 6 * _STAGE) / ((56 - 24) * 2 * _STREAM)
turning_point = Question(
    "Lesson 14: the batch from which on neighbouring stages belong in a node.",
    number("a number of sequences"),
    right=_TURN,
    relative=0.02,
    wrong={
        _TURN / 2: "Those are micro-batches of one replica. There are two replicas.",
        2 * _TURN: "Count again: the batch is micro-batches times replicas.",
    },
    nudge="Let m vary in step_sent: tp and pp grow with m, shard does not. Where do the two sums meet?",
    note="below it the gradients decide, above it the streams",
    expected="sequences of a batch",
)

# Sizes of the axes, bytes that a rank sends along each, GPUs of a node.
_CLUSTERS: tuple[tuple[dict[str, int], dict[str, float], int], ...] = (
    ({"pp": 8, "shard": 2, "tp": 4}, {"pp": 16.0, "shard": 9.5, "tp": 1900.0}, 8),
    ({"pp": 4, "shard": 8, "tp": 2}, {"pp": 8.0, "shard": 8.0, "tp": 30.0}, 8),
    ({"pp": 2, "shard": 8, "tp": 4}, {"pp": 1.0, "shard": 100.0, "tp": 10.0}, 8),
    ({"replicate": 4, "shard": 4, "tp": 4}, {"replicate": 3.0, "shard": 40.0, "tp": 30.0}, 4),
    ({"pp": 3, "shard": 4, "tp": 4}, {"pp": 50.0, "shard": 20.0, "tp": 26.0}, 12),
    ({"pp": 2, "shard": 2, "tp": 4}, {"pp": 15.0, "shard": 10.0, "tp": 90.0}, 8),  # pp is no ring
    (
        {"pp": 2, "shard": 4},
        {"pp": 3.0, "shard": 2.0},
        2,
    ),  # and half of it between nodes is not free
    (
        {"pp": 16, "replicate": 8, "shard": 8, "tp": 4},
        {"pp": 30.0, "replicate": 14.0, "shard": 12.0, "tp": 90.0},
        64,
    ),
)


def least_crossing(sizes: Mapping[str, int], sent: Mapping[str, float], per_node: int) -> float:
    """The fewest bytes that can leave nodes: by how many ranks of each axis lie inside one.

    A block of k ranks of a ring of n has one hop that leaves it, and of a chain the last has none.
    """
    ranks = math.prod(sizes.values())
    return min(
        sum(
            sent[axis] * ranks * (0 if k == n else 1 / k - (1 / n if axis in CHAINS else 0))
            for (axis, n), k in zip(sizes.items(), inside, strict=True)
        )
        for inside in _inside(list(sizes.values()), per_node)
    )


def _inside(sizes: Sequence[int], per_node: int) -> Iterator[tuple[int, ...]]:
    divisors = [[k for k in range(1, n + 1) if n % k == 0] for n in sizes]
    return (row for row in itertools.product(*divisors) if math.prod(row) == per_node)


@takes(function())
def place_axes(answer: Callable[..., Any]) -> Verdict:
    """Exercise 1: axes on nodes, by the bytes that leave them, against the best of all."""
    spent, best, lost, nudge = 0.0, 0.0, "", ""
    for sizes, sent, per_node in _CLUSTERS:
        found = answer(dict(sizes), dict(sent), per_node)
        says = f"{', '.join(f'{a} {n}' for a, n in sizes.items())}, nodes of {per_node}"
        if problem := _layout_problem(found, sizes):
            return not_yet(says, got=shown(found), nudge=problem)
        layout = [(str(axis), int(size)) for axis, size in found if size > 1]
        left = sum(crossing_bytes(layout, sent, per_node).values())
        least = least_crossing(sizes, sent, per_node)
        if not lost and left > least * (1 + 1e-9):
            lost = f"{says}: {left:,.0f} GB leave, and {least:,.0f} is possible"
            nudge = _placement_nudge(layout, sizes, sent, per_node)
        spent, best = spent + left, best + least
    score = scored(round(spent), round(best), "GB leave nodes")
    if lost:
        return not_yet(lost, got=score, nudge=nudge)
    return correct(f"the fewest bytes on all {len(_CLUSTERS)} clusters", score=score)


def _layout_problem(found: Any, sizes: Mapping[str, int]) -> str:
    try:
        pairs = [(str(axis), whole().read(size)) for axis, size in found]
    except (TypeError, ValueError, WrongKind):
        return (
            'Return a list of pairs, slowest first, such as [("pp", 4), ("shard", 2), ("tp", 8)].'
        )
    split = axis_sizes(pairs)
    if {a: n for a, n in split.items() if n > 1} != {a: n for a, n in sizes.items() if n > 1}:
        return "The factors of an axis must multiply out to its size, and there are no other axes."
    return ""


def _placement_nudge(
    layout: Sequence[tuple[str, int]],
    sizes: Mapping[str, int],
    sent: Mapping[str, float],
    per_node: int,
) -> str:
    mine = sum(crossing_bytes(layout, sent, per_node).values())
    as_rings = sum(
        crossing_bytes([(_ring(a), n) for a, n in layout], _rings(sent), per_node).values()
    )
    if as_rings <= least_crossing(_rings(sizes), _rings(sent), per_node) * (1 + 1e-9):
        return (
            'That would be best if stages were a ring. Along "pp" the last one sends nothing to the first: '
            "of n stages n - 1 send."
        )
    if math.prod(sizes.values()) <= MOST_TRIED:
        orders = itertools.permutations(sizes.items())
        best = min(sum(crossing_bytes(order, sent, per_node).values()) for order in orders)
        if mine < best * (1 + 1e-9):
            return (
                "That is the best order of whole axes. An axis may have factors in two places: "
                'two of its ranks in a node, ("pp", 2) at the end, the rest outside.'
            )
    return (
        "The list is slowest first: its last factors lie in a node. What matters is how many ranks of each "
        "axis lie inside one: try them all."
    )


def _ring(axis: str) -> str:
    """The axis under a name that makes a ring of it."""
    return f"{axis} as a ring"


def _rings(by_axis: Mapping[str, Any]) -> dict[str, Any]:
    return {_ring(axis): value for axis, value in by_axis.items()}


@starts_ranks
@takes(function())
def clip_over_axes(answer: Callable[..., Any]) -> Verdict:
    """Exercise 2: one norm over three axes, copies counted once, on eight ranks."""
    try:
        found = run_ranks(
            workers.clipped, workers.BOX.ranks, answer, timeout_seconds=TIMEOUT_SECONDS
        )
    except RankError as error:
        failure = error.failures[error.rank]
        nudge = "Does every rank call the same collectives, also one whose list of gradients is empty, and whose own norm is 0?"
        return not_yet(f"rank {error.rank} {failure.what}", nudge=nudge)
    for number_, case in enumerate(workers.CASES):
        for rank, reports in enumerate(found):
            if verdict := _clip_problem(reports[number_], case, rank):
                return verdict
    calls = sum(report.calls for report in found[0])
    if calls > 3 * len(workers.CASES):
        return not_yet(
            f"{calls} collectives for {len(workers.CASES)} calls",
            expected="at most 3 a call",
            nudge="Add up your own squares first: one number is enough to send.",
        )
    score = scored(calls, len(workers.CASES), "collectives")
    return correct("one norm on all eight ranks", score=score)


def _clip_problem(
    report: workers.ClippingReport, case: workers.ClippingCase, rank: int
) -> Verdict | None:
    right = workers.norm(case)
    alone = workers.norm(case, over=(), rank=rank)
    wrong = {
        workers.norm(
            case, once=False
        ): "Copies are counted on every rank that has one. Count a copy where your "
        "place along each of its axes is 0.",
        alone: "That is this rank's own norm. The others hold other parts: add up over all ranks.",
        workers.norm(
            case, over=("shard", "tp"), rank=rank
        ): "That is the norm of one stage. Add up over pp as well.",
        workers.norm(
            case, over=("shard",), rank=rank
        ): "That is over data ranks alone. Slices and stages hold other gradients.",
        right**2: "That is its square.",
        min(1.0, case.limit) * right: "Return the norm before clipping.",
    }
    wrong = {value: note for value, note in wrong.items() if not equal(value, right, relative=1e-6)}
    found = number("the norm, a number").returned(report.returned)
    nudge = "Squares are added up, over ranks and tensors; the root comes last."
    if verdict := judge(
        found,
        right,
        f"{case.says}, rank {rank}: the norm",
        wrong=wrong,
        nudge=nudge,
        expected="the norm over all ranks",
        relative=1e-6,
    ):
        return verdict
    wanted = min(1.0, case.limit)
    if case.empty_stage is not None and workers.BOX.coordinates(rank)["pp"] == case.empty_stage:
        return None
    if not report.is_in_place or not equal(report.scale, wanted, relative=1e-4):
        nudge = "Multiply every gradient in place, tensor.mul_(...), by limit / norm, and only where the norm is above the limit."
        return not_yet(
            f"{case.says}, rank {rank}: the gradients",
            got=f"times {report.scale:.4f}",
            expected=f"times {wanted:g}",
            nudge=nudge,
        )
    return None


_FAULT = whole("the number of a fault")


@takes(keys({"A: axis": text(), "A: fault": _FAULT, "B: axis": text(), "B: fault": _FAULT}))
def two_faults(answer: Mapping[str, Any]) -> Verdict:
    """Exercise 3: two planted faults, found by taking axes away."""
    wanted = {"A": ("pp", 3), "B": ("shard", 2)}
    notes = {
        ("A", 5): "A norm by stage leaves the loss of step 1 right. Is it, in run A?",
        ("B", 6): "Gradients that are added up leave the loss of step 1 right. Is it, in run B?",
    }
    for run, (axis, fault) in wanted.items():
        nudge = (
            f"Run {run} with two ranks along one axis and one along the others. When is it wrong?"
        )
        if answer[f"{run}: axis"] != axis:
            return not_yet(f"run {run}: the axis", got=shown(answer[f"{run}: axis"]), nudge=nudge)
        given = answer[f"{run}: fault"]
        nudge = notes.get(
            (run, given), "Which of the list needs more than one rank along that axis?"
        )
        if verdict := judge(
            given, fault, f"run {run}: the fault", expected="a number of the list", nudge=nudge
        ):
            return verdict
    return correct("both found by taking axes away, one at a time")


# Layers, bytes of a layer's states and of what it keeps of a micro-batch, of embedding and head.
_MODELS: tuple[tuple[int, int, int, float, float, float], ...] = (
    (24, 4, 16, 3.0, 1.0, 4.0),
    (24, 4, 2, 3.0, 1.0, 4.0),
    (32, 8, 64, 2.0, 0.5, 6.0),
    (30, 6, 6, 1.0, 0.0, 5.0),
    (16, 2, 8, 1.0, 3.0, 0.0),
    (80, 8, 96, 4.6, 0.28, 3.0),
)


def stage_bytes(
    counts: Sequence[int], micro_batches: int, state: float, kept: float, end: float
) -> list[float]:
    """Bytes of each stage under 1F1B: states, activations in flight, embedding or head."""
    p = len(counts)
    ends = [(i == 0) + (i == p - 1) for i in range(p)]
    return [
        n * (state + kept * min(micro_batches, p - i)) + ends[i] * end for i, n in enumerate(counts)
    ]


def least_peak(layers: int, stages: int, m: int, state: float, kept: float, end: float) -> float:
    """The least that the fullest stage can hold: the smallest limit that has room for all layers."""
    empty = stage_bytes([0] * stages, m, state, kept, end)
    one = [
        b - a for a, b in zip(empty, stage_bytes([1] * stages, m, state, kept, end), strict=True)
    ]
    limits = sorted(
        {a + n * b for a, b in zip(empty, one, strict=True) for n in range(1, layers + 1)}
    )
    for limit in limits:
        room = [int((limit - a) / b + 1e-9) for a, b in zip(empty, one, strict=True)]
        if min(room) >= 1 and sum(room) >= layers:
            return limit
    return limits[-1]


@takes(function())
def deal_layers(answer: Callable[..., Any]) -> Verdict:
    """Exercise 4: layers dealt to stages so that the fullest stage holds least."""
    spent, best, lost, nudge = 0.0, 0.0, "", ""
    for given in _MODELS:
        layers, stages, m, state, kept, end = given
        found = answer(*given)
        says = f"{layers} layers on {stages} stages, {m} micro-batches, {state:g} + {kept:g} GB a layer, ends {end:g} GB"
        try:
            counts = [whole().read(n) for n in found]
        except (TypeError, WrongKind):
            return not_yet(says, got=shown(found), nudge="Return one whole number for each stage.")
        if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
            nudge = "One number a stage, each at least 1, and they add up to the layers."
            return not_yet(says, got=shown(found), nudge=nudge)
        peak, least = max(stage_bytes(counts, m, state, kept, end)), least_peak(*given)
        if peak > least * (1 + 1e-9) and not lost:
            nudge = "Stage i holds min(m, p - i) micro-batches; embedding and head lie at the ends."
            lost = f"{says}: the fullest stage holds {peak:g} GB, and {least:g} is possible"
        spent, best = spent + peak, best + least
    score = scored(round(spent, 2), round(best, 2), "GB")
    if lost:
        return not_yet(lost, got=score, nudge=nudge)
    return correct("the least peak on all models", score=score)
