"""What the checks of lab 13 try: shapes of pipelines, programs that hang, layers to cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from utils.parallel.actions import Action, DeadlockError, Program, marks, needs, read_program, walk
from utils.planner.schedules import schedule_actions

SHAPES = [(4, 8), (2, 3), (3, 3), (5, 12), (4, 2), (6, 1), (1, 4)]  # stages, micro-batches
OWN = [(4, 8), (2, 4), (3, 9), (5, 5), (4, 12), (6, 8)]

_BROKEN = [
    "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
    "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5",
    "2F0 2F1 2F2 2B0 2F3 2B1 2F4 2B2 2F5 2B3 2B4 2B5",
    "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
]
BROKEN = [row.split() for row in _BROKEN]


@dataclass(frozen=True)
class StuckCase:
    """A program, and where each of its ranks stands in the end."""

    says: str
    rows: list[list[str]]
    nudge: str

    @property
    def right(self) -> list[str | None]:
        """By rank: an action, or None where the list gets done."""
        return _stand(read_program(self.rows))

    @property
    def one_sweep(self) -> list[str | None]:
        """What comes of going round the ranks once."""
        rows, found, done = read_program(self.rows), list[str | None](), set[Action]()
        last = max(action.stage for row in rows for action in row)
        for row in rows:
            waiting = None
            for action in row:
                if not done.issuperset(needs(action, last)):
                    waiting = str(action)
                    break
                done |= marks(action)
            found.append(waiting)
        return found


def _stand(rows: Program) -> list[str | None]:
    try:
        for _ in walk(rows):
            pass
    except DeadlockError as error:
        waits = {rank: str(action) for rank, (action, _) in error.waits.items()}
        return [waits.get(rank) for rank in range(len(rows))]
    return [None] * len(rows)


def _texts(rows: Program) -> list[list[str]]:
    return [[str(action) for action in row] for row in rows]


def _reversed_warm_up() -> list[list[str]]:
    rows = []
    for rank in range(4):
        forward, backward = ([f"{rank}{kind}{k}" for k in range(6)] for kind in "FB")
        steady = [a for pair in zip(forward[rank:], backward, strict=False) for a in pair]
        rows.append(forward[:rank] + steady + backward[6 - rank :])
    return rows


STUCK = [
    StuckCase("1F1B, which runs", _texts(schedule_actions("1f1b", 4, 6)),
              "Nothing hangs here. What does a backward of the last stage need?"),
    StuckCase("a warm-up that grows from rank to rank", _reversed_warm_up(),
              "A backward also needs the one on the stage behind."),
    StuckCase("ZB-H1, which runs", _texts(schedule_actions("zb-h1", 3, 4)),
              "I gives the stage before what it waits for, as B does; W needs the I of its own stage."),
    StuckCase("a whole backward that follows a split one", [["0F0", "0B0"], ["1F0", "1I0", "1W0"]],
              "0B0 needs a gradient of the input of stage 1: 1I0 gives it, as 1B0 would."),
    StuckCase("W before its I", [["0F0", "0W0", "0I0"], ["1F0", "1I0", "1W0"]],
              "W needs the I of its own stage; a rank that finishes gives None."),
    StuckCase("two stages on a rank, in a V", [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]],
              "Look for actions by their stage: the next stage may be on the same rank, or any other."),
    StuckCase("a forward that nobody runs", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"]],
              "Rank 1 is done with its list, so what rank 0 waits for never comes."),
    StuckCase("a backward before its own forward", [["0F0", "0B0"], ["1B0", "1F0"]],
              "The last stage's backward needs its own forward, and so does any other's."),
]  # fmt: skip


def layer_problems() -> list[tuple[list[float], int]]:
    """Seconds of layers, and stages: one that defeats equal cuts, one greed, and drawn ones."""
    draw = random.Random(13)
    drawn = [([round(draw.uniform(1, 9), 1) for _ in range(n)], p)
             for n, p in ((8, 3), (24, 4), (40, 8), (100, 16))]  # fmt: skip
    return [
        ([1.0] + [4.0] * 10 + [9.0], 4),
        ([3.0, 3.0, 3.0, 1.0, 5.0, 5.0], 3),
        ([2.0] * 5, 5),
        *drawn,
    ]


def best_cut(seconds: Sequence[float], stages: int) -> float:
    """The least possible time of the slowest of contiguous stages, each with a layer or more."""
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    best = sums[:]
    for parts in range(2, stages + 1):
        best = [
            min(
                (max(best[k], sums[n] - sums[k]) for k in range(parts - 1, n)), default=float("inf")
            )
            for n in range(len(sums))
        ]
    return best[-1]
