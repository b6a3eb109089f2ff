"""Pipeline schedules, executed: who does what when, how much is in flight, where ranks idle.

`order` gives each rank its list of work, `run` executes the lists with their dependencies. The
closed forms that the search uses stand beside them; tests hold the two equal.

    1F1B         in flight on stage i: min(m, p - i)           bubble / work: (p - 1) / m
    GPipe        in flight: m                                  bubble / work: (p - 1) / m
    interleaved  in flight: v chunks of min(m, ...)            bubble / work: (p - 1) / (v * m)

Sources: Huang et al. 2018 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473,
section 2.2; the order of interleaved chunks is Megatron-LM's, schedules.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.catalog.rules import divides, whole


@dataclass(frozen=True)
class Work:
    """One forward or backward pass of one micro-batch through one chunk of layers.

    Attributes:
        forward: Forward, or else backward.
        micro_batch: Which micro-batch, from 0.
        chunk: Which of the rank's chunks, from 0.
    """

    forward: bool
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True)
class Run:
    """A schedule that ran.

    Attributes:
        starts: Per rank, the start of each piece of work, in the unit of its durations.
        ends: Per rank, the end of each.
        total: The end of the last.
        busy: What one rank works, bubbles left out.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    total: float
    busy: float

    @property
    def bubble_ratio(self) -> float:
        """Idle time over working time of a rank."""
        return self.total / self.busy - 1


def order(
    schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1
) -> list[list[Work]]:
    """Each rank's work, in order.

    Args:
        schedule: "1f1b" or "gpipe"; 1f1b with virtual_stages above 1 is interleaved.
        stages: p.
        micro_batches: m.
        virtual_stages: v, chunks on each rank.

    Raises:
        ValueError: a count below 1, or micro-batches that the stages do not divide (interleaved).
    """
    stages, micro_batches, virtual_stages = whole(
        "schedule", stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    ).values()
    if virtual_stages > 1:
        divides("stages", stages, "micro-batches", micro_batches)
    work = micro_batches * virtual_stages
    rows = []
    for rank in range(stages):
        forward = [_nth(k, stages, virtual_stages, True) for k in range(work)]
        backward = [_nth(k, stages, virtual_stages, False) for k in range(work)]
        warm = work if schedule == "gpipe" else _warm_up(rank, stages, work, virtual_stages)
        rows.append(_one_forward_one_backward(forward, backward, warm))
    return rows


def _nth(k: int, stages: int, chunks: int, forward: bool) -> Work:
    """The k-th forward (or backward) of a rank: groups of p micro-batches, chunk by chunk."""
    group, rest = divmod(k, stages * chunks)
    chunk = rest // stages if chunks > 1 else 0
    micro_batch = group * stages + rest % stages if chunks > 1 else k
    return Work(forward, micro_batch, chunk if forward else chunks - 1 - chunk)


def _warm_up(rank: int, stages: int, work: int, chunks: int) -> int:
    if chunks == 1:
        return min(work, stages - rank - 1)
    return min(work, 2 * (stages - rank - 1) + (chunks - 1) * stages)


def _one_forward_one_backward(forward: list[Work], backward: list[Work], warm: int) -> list[Work]:
    steady = [pair for both in zip(forward[warm:], backward, strict=False) for pair in both]
    return forward[:warm] + steady + backward[len(forward) - warm :]


def in_flight(row: list[Work]) -> int:
    """Most micro-batch chunks whose activations one rank holds at once."""
    held = peak = 0
    for work in row:
        held += 1 if work.forward else -1
        peak = max(peak, held)
    return peak


def in_flight_closed(
    schedule: str, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1
) -> int:
    """`in_flight` without running: micro-batches, or chunks of them where stages interleave."""
    work = micro_batches * virtual_stages
    if schedule == "gpipe":
        return work
    return min(work, _warm_up(stage, stages, work, virtual_stages) + 1)


def bubble_closed(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle over working time of a rank with equal stages: (p - 1) / (v * m)."""
    return (stages - 1) / (virtual_stages * micro_batches)


def run(
    rows: list[list[Work]],
    forward: float,
    backward: float,
    transfer: float = 0.0,
    chunks: int = 1,
) -> Run:
    """Execute a schedule: each piece waits for its rank and for what it depends on.

    Args:
        rows: What `order` gave.
        forward: Duration of one chunk's forward pass.
        backward: Duration of one chunk's backward pass.
        transfer: Duration of sending activations to the next chunk.
        chunks: Chunks on each rank.

    Raises:
        ValueError: the schedule cannot finish: work waits for work that never comes.
    """
    done: dict[tuple[int, Work], float] = {}
    position, clock = [0] * len(rows), [0.0] * len(rows)
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    while any(position[r] < len(row) for r, row in enumerate(rows)):
        moved = False
        for r, row in enumerate(rows):
            while position[r] < len(row):
                work = row[position[r]]
                ready = _ready(done, r, work, len(rows), chunks, transfer)
                if ready is None:
                    break
                start = max(clock[r], ready)
                clock[r] = start + (forward if work.forward else backward)
                done[r, work] = clock[r]
                starts[r].append(start)
                ends[r].append(clock[r])
                position[r] += 1
                moved = True
        if not moved:
            raise ValueError("The schedule deadlocks: every rank waits for work of another.")
    busy = len(rows[0]) / 2 * (forward + backward)
    return Run(tuple(map(tuple, starts)), tuple(map(tuple, ends)), max(clock), busy)


def _ready(
    done: dict[tuple[int, Work], float], rank: int, work: Work, ranks: int, chunks: int,
    transfer: float,
) -> float | None:  # fmt: skip
    """When the input of `work` is there; None if not yet known."""
    place = work.chunk * ranks + rank
    last = ranks * chunks - 1
    if work.forward and place == 0:
        return 0.0
    if not work.forward and place == last:
        return done.get((rank, Work(True, work.micro_batch, work.chunk)))
    before = place - 1 if work.forward else place + 1
    chunk, other = divmod(before, ranks)
    end = done.get((other, Work(work.forward, work.micro_batch, chunk)))
    return None if end is None else end + (transfer if other != rank else 0.0)
