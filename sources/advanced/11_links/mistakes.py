"""Answers to the exercises of lab 11 that are known, each wrong one with words of its verdict."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from utils.labs.mistakes import KnownAnswers

from . import algorithms
from .wire import Wire

known = KnownAnswers()
known.mistakes(
    "ring_of_64",
    factor_alone=(2, "factor for 64"),
    one_round=(0.984, "one round"),
    with_its_unit=("2 GB", "a number of GB"),
)
known.mistakes(
    "fewer_on_64",
    eight=(8, "one hop of eight"),
    two_hosts=(1.75, "two hosts"),
)
known.mistakes(
    "ranks_of_that_run",
    two_too_few_in_front=(12, "a 2 in front"),
    sixteen=(16, "1.875"),
)
known.mistakes(
    "node_to_look_at",
    came_first=(0, "came last"),
)


def ring_by_number(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    return algorithms.ring_all_reduce(wire, tensor)


def through_rank_0(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    return algorithms.tree_all_reduce(wire, tensor)


def by_gloo(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def not_in_place(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    order = sorted(range(wire.size), key=lambda rank: host_of[rank])
    return algorithms.ring_all_reduce(wire.among(order), tensor.clone())


def one_after_the_other(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    """Right on an even number of ranks, but each step sends, and then receives, or the reverse."""
    order = sorted(range(wire.size), key=lambda rank: host_of[rank])
    joined = wire.among(order)

    def exchange(part: Any, to: int, source: int, like: Any = None) -> Any:
        if joined.rank % 2 == 0:
            joined.send(part, to)
        received = joined.receive(part if like is None else like, source)
        if joined.rank % 2:
            joined.send(part, to)
        return received

    joined.exchange = exchange  # type: ignore[method-assign]
    return algorithms.ring_all_reduce(joined, tensor)


def all_send_first(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    wire.send(tensor, (wire.rank + 1) % wire.size)
    return tensor.add_(wire.receive(tensor, (wire.rank - 1) % wire.size))


def whole_tensors(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> torch.Tensor:
    order = sorted(range(wire.size), key=lambda rank: host_of[rank])
    place, passed = order.index(wire.rank), tensor.clone()
    for _ in range(wire.size - 1):
        right, left = order[(place + 1) % wire.size], order[place - 1]
        passed = wire.exchange(passed, right, left)
        tensor += passed
    return tensor


known.mistakes(
    "ordered_ring",
    ring_by_number=(ring_by_number, "sort ranks by host"),
    through_rank_0=(through_rank_0, "one neighbour alone"),
    by_gloo=(by_gloo, "Use the wire alone"),
    not_in_place=(not_in_place, "Work in place"),
    one_after_the_other=(one_after_the_other, "belong into one step"),
    whole_tensors=(whole_tensors, "one part of the tensor"),
    nothing_sent=(lambda wire, tensor, host_of: tensor, "Nobody sent anything"),
)
known.mistakes(
    "ordered_ring",
    timeout_seconds=3.0,
    all_send_first=(all_send_first, "all send first and nobody receives"),
)


@known.right("ordered_ring", "14,336 bytes between hosts, both directions, par 14,336")
def ring_of_views(wire: Wire, tensor: torch.Tensor, host_of: list[int]) -> None:
    """A right answer written in another way: from high hosts to low, nothing returned."""
    order = sorted(range(wire.size), key=lambda rank: (-host_of[rank], rank))
    algorithms.ring_all_reduce(wire.among(order), tensor)


def star(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    for rank in range(wire.size):
        if rank != root and wire.rank == root:
            wire.send(tensor, rank)
    return tensor if wire.rank == root else tensor.copy_(wire.receive(tensor, root))


def from_rank_0(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    return algorithms.tree_broadcast(wire, tensor)


def powers_of_two_alone(wire: Wire, tensor: torch.Tensor, root: int) -> torch.Tensor:
    place, have = (wire.rank - root) % wire.size, 1
    while have < wire.size:
        if place < have:
            wire.send(tensor, (place + have + root) % wire.size)
        elif place < 2 * have:
            tensor.copy_(wire.receive(tensor, (place - have + root) % wire.size))
        have *= 2
    return tensor


known.mistakes(
    "tree_broadcast",
    star=(star, "could send it on in the next step"),
    from_rank_0=(from_rank_0, "Count ranks from the root"),
)
known.mistakes(
    "tree_broadcast",
    timeout_seconds=3.0,
    powers_of_two_alone=(powers_of_two_alone, "waits for a message that nobody sends"),
)


@known.right("tree_broadcast", "10 steps in all four, par 10")
def as_in_the_lab(solution: Any, *given: Any) -> Any:
    return solution(*given)


def finish(closes: Any, waits: bool = True, last: bool = True, each: bool = False) -> Any:
    def answer(ready: Any, sizes: Any, bucket: Any, alpha: Any, rate: Any) -> float:
        free, filled = 0.0, 0
        for number, (at, size) in enumerate(zip(ready, sizes, strict=True)):
            filled += size
            if closes(filled, bucket) or (last and number == len(ready) - 1):
                free = (max(free, at) if waits else at) + alpha + filled / rate
                filled = 0
        return free

    return answer


known.mistakes(
    "finish_seconds",
    after_backward=(
        lambda r, s, b, a, w: r[-1] + len(s) * a + sum(s) / w,
        "Buckets go while backward goes on",
    ),
    starts_at_once=(
        finish(lambda filled, bucket: filled >= bucket, waits=False),
        "all-reduce before it",
    ),
    last_left_out=(
        finish(lambda filled, bucket: filled >= bucket, last=False),
        "what is left goes",
    ),
    strictly_more=(finish(lambda filled, bucket: filled > bucket), "closed: >=, not >"),
    not_finite=(lambda r, s, b, a, w: float("nan"), "no finite number"),
)


def each_has_one(messages: list[Any], ranks: int) -> bool:
    targets = {m.source: m.target for m in messages}
    return sorted(targets.values()) == list(range(ranks))


def never_closes(noted: Any, ranks: int) -> bool:
    """Walks as far as there are ranks, and does not ask where it ends."""
    targets: dict[int, set[int]] = {}
    for m in noted:
        targets.setdefault(m.source, set()).add(m.target)
    seen, at = [], 0
    while at in targets and at not in seen and len(targets[at]) == 1:
        seen.append(at)
        (at,) = targets[at]
    return len(seen) == ranks == len(targets)


known.mistakes(
    "is_one_ring",
    by_number=(
        lambda messages, ranks: all((m.target - m.source) % ranks == 1 for m in messages),
        "any order that closes",
    ),
    each_has_one=(each_has_one, "Walk round from rank 0"),
    always=(lambda messages, ranks: True, "go to the one it sends to"),
    one=(lambda messages, ranks: 1, "True or False"),
    never_closes=(never_closes, "A ring closes where it began"),
    first_step=(
        lambda solution, noted, ranks: solution([m for m in noted if m.step == 1], ranks),
        "in all steps",
    ),
)
known.mistakes(
    "job_a",
    hardware=({"layer": "hardware", "node": 2, "seconds saved": 0.22}, "before forward"),
    another_node=({"layer": "code", "node": 0, "seconds saved": 0.22}, "different from the others"),
    whole_step=({"layer": "code", "node": 2, "seconds saved": 0.76}, "the whole step"),
)
known.mistakes(
    "job_b",
    network=(
        {"layer": "network", "node": "all", "seconds saved": 0.5},
        "How many bytes do all messages",
    ),
    collectives=({"layer": "collectives", "node": "all", "seconds saved": 0.1}, "backward hides"),
)
known.mistakes(
    "job_c",
    straggler=({"layer": "hardware", "node": 1, "seconds saved": 0.01}, "2% slower"),
    network_of_6=({"layer": "network", "node": 6, "seconds saved": 0.54}, "healthy step"),
)
