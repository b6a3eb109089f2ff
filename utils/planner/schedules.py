"""Pipeline schedules, executed: who does what when, how much is in flight, where ranks idle.

`schedule_actions` gives each rank its list of actions, `run_schedule` executes the lists with their
dependencies. The closed forms that the search uses stand beside them; tests hold the two equal.

    1F1B         in flight on stage i: min(m, p - i)           bubble / work: (p - 1) / m
    GPipe        in flight: m                                  bubble / work: (p - 1) / m
    interleaved  in flight: v chunks of min(m, ...)            bubble / work: (p - 1) / (v * m)
    ZB-H1        in flight: min(m, p), until the weights' pass bubble / work: (p - 1) / (3 * m)

All for equal stages and free messages; ZB-H1's bubble also for passes F, I and W of equal length and
m of at least p.

Where a message takes time, a step of GPipe waits for 2 (p - 1) of them. 1F1B, where p divides m, waits for
2 (p - 1) / p in each micro-batch and for 2 (p - 2) more. Interleaving waits for 2 (v p - 1) while a message is
no longer than a chunk's forward, and ZB-H1, with F, I and W equally long, for 4 (p - 1) up to half of one.

Sources: Huang et al. 2018 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473,
section 2.2; the order of interleaved chunks is Megatron-LM's, schedules.py; Qi et al. 2023 (ZB-H1),
arXiv:2401.10241, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from utils.parallel.actions import Action, Program, marks, needs, stage_owners, walk
from utils.rules import divides, one_of, whole

ORDERS = ("1f1b", "gpipe", "zb-h1")


@dataclass(frozen=True)
class Run:
    """A schedule that ran, as predicted or as measured.

    Attributes:
        starts: Per rank, the start of each action, in the unit of its durations.
        ends: Per rank, the end of each.
        total: The end of the last.
        busy: What one rank works, bubbles left out; the busiest, where they differ.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    total: float
    busy: float

    @property
    def bubble_ratio(self) -> float:
        """Idle time over working time of a rank."""
        return self.total / self.busy - 1


def schedule_actions(
    schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1
) -> list[list[Action]]:
    """Each rank's actions, in order.

    Args:
        schedule: "1f1b", "gpipe" or "zb-h1"; 1f1b with virtual_stages above 1 is interleaved.
        stages: p, the ranks; chunk c of rank r is stage c * p + r.
        micro_batches: m.
        virtual_stages: v, chunks on each rank.

    Raises:
        ValueError: an unknown schedule, a count below 1, micro-batches that the stages do not
            divide (interleaved), or chunks for a schedule that has none.
    """
    one_of("schedule", schedule, ORDERS)
    stages, micro_batches, virtual_stages = whole(
        "schedule", stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    ).values()
    if virtual_stages > 1:
        if schedule == "zb-h1":
            raise ValueError("ZB-H1 has one chunk on each rank: write virtual_stages=1.")
        divides("stages", stages, "micro-batches", micro_batches)
    if schedule == "zb-h1":
        return [_zero_bubble(rank, stages, micro_batches) for rank in range(stages)]
    work, rows = micro_batches * virtual_stages, []
    for rank in range(stages):
        forward = [_nth(k, rank, stages, virtual_stages, "F") for k in range(work)]
        backward = [_nth(k, rank, stages, virtual_stages, "B") for k in range(work)]
        warm = work if schedule == "gpipe" else _warm_up(rank, stages, work, virtual_stages)
        rows.append(_one_forward_one_backward(forward, backward, warm))
    return rows


def _nth(k: int, rank: int, stages: int, chunks: int, kind: str) -> Action:
    """The k-th forward (or backward) of a rank: groups of p micro-batches, chunk by chunk."""
    group, rest = divmod(k, stages * chunks)
    chunk = rest // stages if chunks > 1 else 0
    micro_batch = group * stages + rest % stages if chunks > 1 else k
    chunk = chunk if kind == "F" else chunks - 1 - chunk
    return Action(chunk * stages + rank, kind, micro_batch)


def _warm_up(rank: int, stages: int, work: int, chunks: int) -> int:
    if chunks == 1:
        return min(work, stages - rank - 1)
    return min(work, 2 * (stages - rank - 1) + (chunks - 1) * stages)


def _one_forward_one_backward(
    forward: list[Action], backward: list[Action], warm: int
) -> list[Action]:
    steady = [pair for both in zip(forward[warm:], backward, strict=False) for pair in both]
    return forward[:warm] + steady + backward[len(forward) - warm :]


def _zero_bubble(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """ZB-H1: 1F1B, in which rank i puts off its passes to the weights by i micro-batches."""
    warm, row, weights = _warm_up(rank, stages, micro_batches, 1), [], 0
    row = [Action(rank, "F", k) for k in range(warm)]
    for k in range(micro_batches):
        if warm + k < micro_batches:
            row.append(Action(rank, "F", warm + k))
        row.append(Action(rank, "I", k))
        if k >= rank:
            row.append(Action(rank, "W", weights))
            weights += 1
    return row + [Action(rank, "W", k) for k in range(weights, micro_batches)]


def in_flight(row: Sequence[Action]) -> int:
    """Most micro-batch chunks whose activations one rank holds at once.

    They stay until the whole backward, or, where it is split, until the pass to the weights.
    """
    held = peak = 0
    for action in row:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def in_flight_closed(
    schedule: str, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1
) -> int:
    """`in_flight` without running: micro-batches, or chunks of them where stages interleave."""
    work = micro_batches * virtual_stages
    if schedule == "gpipe":
        return work
    if schedule == "zb-h1":
        return min(work, stages)
    return min(work, _warm_up(stage, stages, work, virtual_stages) + 1)


def bubble_closed(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle over working time of a rank with equal stages: (p - 1) / (v * m)."""
    return (stages - 1) / (virtual_stages * micro_batches)


def count_messages(rows: Program) -> int:
    """Messages between ranks in a step: activations forward, gradients back.

    With v chunks that go around it is 2 (v p - 1) m. Neighbouring stages on one rank send nothing.
    """
    owners = stage_owners(rows)
    crossing = {s for s in owners if s and owners[s] != owners[s - 1]}
    return sum(
        (action.kind == "F" and action.stage + 1 in crossing)
        or (action.kind in "BI" and action.stage in crossing)
        for row in rows
        for action in row
    )


def run_schedule(
    rows: Program,
    forward: float,
    backward: float,
    transfer: float = 0.0,
    *,
    weights: float | None = None,
    launch: float = 0.0,
) -> Run:
    """Execute a schedule: each action waits for its rank and for what it depends on.

    Args:
        rows: What `schedule_actions` gave.
        forward: Duration of one chunk's forward pass.
        backward: Duration of one chunk's whole backward pass.
        transfer: Duration of sending activations or gradients to another rank.
        weights: How much of `backward` is the pass to the weights; half of it if left out.
        launch: What a rank needs from the end of an action to the start of its next.

    Raises:
        DeadlockError: the schedule cannot finish: work waits for work that never comes.
    """
    weights = backward / 2 if weights is None else weights
    takes = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
    owners, spans = stage_owners(rows), dict[Action, tuple[float, float]]()
    done, clock = dict[Action, float](), [0.0] * len(rows)
    for rank, action in walk(rows):
        ready = [
            done[need] + (transfer if owners[need.stage] != rank else 0.0)
            for need in needs(action, len(owners) - 1)
        ]
        start = max(clock[rank], *ready) if ready else clock[rank]
        end = start + takes[action.kind]
        clock[rank], spans[action] = end + launch, (start, end)
        done |= dict.fromkeys(marks(action), end)
    return timed(rows, spans)


def timed(rows: Program, spans: Mapping[Action, tuple[float, float]]) -> Run:
    """A run from the start and the end of each action, such as clocks gave them; it starts at 0.

    A B may be given as its I and W, one after the other.

    Raises:
        KeyError: an action has no times.
    """

    def of(action: Action) -> tuple[float, float]:
        parts = [action] if action in spans else marks(action)
        starts, ends = zip(*(spans[part] for part in parts), strict=True)
        return min(starts), max(ends)

    found = [[of(action) for action in row] for row in rows]
    first = min(start for row in found for start, _ in row)
    busy = max(sum(end - start for start, end in row) for row in found)
    total = max(end for row in found for _, end in row) - first
    starts = tuple(tuple(start - first for start, _ in row) for row in found)
    ends = tuple(tuple(end - first for _, end in row) for row in found)
    return Run(starts, ends, total, busy)


# What labs of earlier versions import.
order, run, sends = schedule_actions, run_schedule, count_messages
