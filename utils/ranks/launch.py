"""`run_ranks`: a function on several ranks of a process group, from a notebook cell."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from utils.checked import asks_first, in_order
from utils.files import scratch
from utils.parallel.loopback import loopback_port
from utils.ranks.child import pack
from utils.ranks.killable import KillableProcess, kill_all
from utils.ranks.member import MeetingPoint, Member
from utils.ranks.outcome import Failure, Outcome
from utils.ranks.position import Position
from utils.ranks.printed_lines import RankLines
from utils.ranks.progress import RankProgress
from utils.ranks.report import RankError
from utils.ranks.server import start_server
from utils.ranks.tensor_sizes import Given

MOST_RANKS = 16
SETTLE_SECONDS = 0.5  # after a first failure, for others that have news of their own
BAR_SECONDS = 0.25


@asks_first(in_order("function", "world_size", "run_ranks(worker, 4)"))
def run_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    share_gpus: bool = False,
) -> list[Any]:
    """Call `worker(*args)` on `world_size` ranks of a process group and return their results.

    Each rank is a process of its own on this machine, with one thread; `torch.distributed` is
    initialised before the call (gloo, and NCCL beside it where every rank has a GPU) and
    destroyed after it. The worker may be defined in the notebook; it asks `dist.get_rank()` who
    it is. What ranks print is shown while they run, line by line; a bar that a rank draws stands
    beside the bar of the ranks. The first launch takes seconds, each later one about 0.1 s. So
    does the first one inside of a rank or a lab's check, which imports torch anew, and all of the
    libraries that are preloaded here. Results pass through a pipe, 1 s for 100 to 200 MB: give back
    numbers rather than weights. No process is left when this returns or raises, nor ten seconds after
    this process has ended, however it does.

    Args:
        worker: what every rank calls. Give its result as numbers or CPU tensors.
        world_size: the number of ranks, 1 to 16.
        args: arguments, the same for all ranks.
        timeout_seconds: from the call of the worker to its end, on every rank.
        share_gpus: let ranks see GPUs of which there are fewer than ranks; their group is gloo's. Else
            they see none, so that libraries which take the GPUs they find stay on the CPU as well.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: a rank raised, died, also after it gave its result, or took too long; it says
            which one and where they stood.
        ValueError: the world size or the timeout cannot be used.
        TypeError: the worker or an argument cannot be sent to another process.
        RuntimeError: this system cannot start such processes.
        FileNotFoundError: the working folder has been deleted.
    """
    _check(worker, world_size, timeout_seconds)
    with meeting_point() as place:
        members = [
            Member(rank, world_size, place, timeout_seconds, shares_gpus=share_gpus)
            for rank in range(world_size)
        ]
        return run_members(worker, args, members)


def prepare_ranks() -> None:
    """Import in the background what the first `run_ranks` would wait for, and return at once.

    Call it after the imports of libraries that ranks use; nothing but waiting changes by it.

    Raises:
        RuntimeError: this system cannot start such processes.
    """
    start_server()


def run_members(
    worker: Callable[..., Any], args: tuple[Any, ...], members: Sequence[Member]
) -> list[Any]:
    """As `run_ranks`, for ranks that may join in ways of their own; all have one timeout."""
    call = pack(worker, args)
    processes = {
        member.rank: KillableProcess(
            call, timeout_seconds=member.timeout_seconds, surroundings=member
        )
        for member in members
    }
    try:
        for process in processes.values():
            process.start()
        outcomes, stand = _watch(processes)
    finally:
        kill_all(processes.values())
    failures = {rank: found.failure for rank, found in outcomes.items() if found.failure}
    if failures:
        name = getattr(worker, "__name__", type(worker).__name__)
        prints = [found.output for found in outcomes.values()]
        raise RankError(name, failures, stand.positions, prints, stand.given)
    return [outcomes[member.rank].value for member in members]


def _check(worker: Any, world_size: Any, timeout_seconds: float) -> None:
    if not callable(worker):
        raise ValueError("run_ranks needs a function first: run_ranks(worker, 4).")
    check_world(world_size, timeout_seconds, "The function comes first: run_ranks(worker, 4).")


def check_world(world_size: Any, timeout_seconds: float, order: str) -> None:
    """Refuse a number of ranks or a timeout that cannot be used.

    Raises:
        ValueError: what is wrong with it; `order` reminds of the order of arguments.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise ValueError(
            f"world_size= is the number of ranks, a whole number; got {world_size!r}. {order}"
        )
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(
            f"world_size={world_size} cannot run here: 1 to {MOST_RANKS} ranks run as processes "
            "of one machine. For larger worlds use simulate(..., world=...)."
        )
    if not isinstance(timeout_seconds, (int, float)) or not 0 < timeout_seconds < math.inf:
        raise ValueError(
            f"timeout_seconds= must be positive, a number of seconds; got {timeout_seconds!r}."
        )


@contextlib.contextmanager
def meeting_point() -> Iterator[MeetingPoint]:
    """Where ranks find each other, for this user alone."""
    with scratch("ranks") as folder:
        yield MeetingPoint(str(folder / "store"), loopback_port())


@dataclass
class _Stand:
    """Where running ranks stood when something went wrong, and what they gave to collectives."""

    positions: dict[int, Position] = field(default_factory=dict)
    given: dict[int, Sequence[Given]] = field(default_factory=dict)

    def ask(self, running: Mapping[int, KillableProcess]) -> None:
        """Ask ranks that have not been asked yet."""
        for rank, process in running.items():
            if rank not in self.positions:
                self.positions[rank] = process.position()
                self.given[rank] = process.given()


def _watch(processes: Mapping[int, KillableProcess]) -> tuple[dict[int, Outcome], _Stand]:
    """All outcomes; after a first failure what is known then, and where the ranks stood."""
    lines = {rank: RankLines(rank, process) for rank, process in processes.items()}
    outcomes: dict[int, Outcome] = {}
    stand = _Stand()
    with RankProgress(len(processes)) as progress:
        while len(outcomes) < len(processes) and not _failed(outcomes):
            running = {rank: p for rank, p in processes.items() if rank not in outcomes}
            _next_news(running, outcomes, stand)
            progress.write(line for rank in running for line in lines[rank].take())
            live = (lines[rank].live for rank in running if rank not in outcomes)
            progress.show(len(outcomes), next(filter(None, live), ""))
        if _failed(outcomes):
            _settle(processes, outcomes, stand)
        progress.write(line for each in lines.values() for line in each.take_rest())
    return outcomes, stand


def _next_news(
    running: Mapping[int, KillableProcess], outcomes: dict[int, Outcome], stand: _Stand
) -> None:
    """Wait for something to happen; at the timeout, first ask every rank where it stands."""
    left = min(process.seconds_left for process in running.values())
    wait([w for p in running.values() for w in p.waitables], timeout=min(left, BAR_SECONDS))
    if any(process.is_too_slow for process in running.values()):
        stand.ask(running)
    _poll(running, outcomes)


def _settle(
    processes: Mapping[int, KillableProcess], outcomes: dict[int, Outcome], stand: _Stand
) -> None:
    """Hear the others out for a moment, then say where each rank stood.

    The first to be heard of need not be the cause: others notice a death at once.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    running = {rank: p for rank, p in processes.items() if rank not in outcomes}
    while running and (left := deadline - time.monotonic()) > 0:
        wait([w for p in running.values() for w in p.waitables], timeout=left)
        _poll(running, outcomes)
        running = {rank: p for rank, p in processes.items() if rank not in outcomes}
    failures: dict[int, Failure] = {r: o.failure for r, o in outcomes.items() if o.failure}
    known = {rank: f.position for rank, f in failures.items() if f.position}
    stand.ask(running)
    stand.positions = known | stand.positions
    stand.given = {rank: process.given() for rank, process in processes.items()} | stand.given


def _poll(running: Mapping[int, KillableProcess], outcomes: dict[int, Outcome]) -> None:
    for rank, process in running.items():
        outcome = process.poll()
        if outcome:
            outcomes[rank] = outcome


def _failed(outcomes: Mapping[int, Outcome]) -> bool:
    return any(outcome.failure for outcome in outcomes.values())
