"""What a job met and how it came back: faults to plant, and moments read off its journal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.checked import check_public

__all__ = ["ElasticRun", "Fault", "Recovery"]

KINDS = ("kill a rank", "kill a host", "cut the link")
# What a script notes, each with the whole numbers that belong to it.
NUMBERS = {"start": ("world", "step", "pid"), "step": ("step",), "saw": (), "done": ()}


class JournalError(ValueError):
    """A journal that cannot be read; the message says which line, and what a line is."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a job once it has done a step.

    Attributes:
        kind: "kill a rank" (SIGKILL), "kill a host" (its agent and all ranks there) or "cut the
            link" (of the second host, both ways; nobody is told).
        at_step: The step after which it happens.
        target: The rank or the host; a cut link has none.
        seconds: How long a host stays away, or a link stays cut.
    """

    kind: str
    at_step: int
    target: int = 1
    seconds: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot happen."""
        if self.kind not in KINDS:
            raise ValueError(f"There is no fault {self.kind!r}; write one of {', '.join(KINDS)}.")
        if self.at_step < 0 or self.target < 0 or not 0 <= self.seconds <= 600:
            raise ValueError(
                f"{self}: the step and the target count from 0, and the seconds are 0 to 600."
            )


@dataclass(frozen=True)
class Moment:
    """Something that a rank noted or that was done to the job.

    Attributes:
        seconds: Since the launch.
        what: Of ranks "start", "step", "saw" or "done"; of the launcher "fault", "link is back",
            "agent started" or "agent ended".
        host, rank: Where; None where it is nobody's in particular.
        more: What was noted with it.
    """

    seconds: float
    what: str
    host: int | None = None
    rank: int | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recovery:
    """One fault and what came after it. Seconds count from the fault.

    Attributes:
        noticed_seconds: When the first rank saw an error; None if none wrote one.
        saw: By rank, its seconds and the first sentence of what it saw.
        back_seconds: When the first step after it was done.
        ranks_before, ranks_after: The sizes of the world, just before it and at the first step after.
        steps_lost: Done before, and done again.
        named: Who is to blame, by the evidence alone: who fell silent, and whose agent is a new one.
    """

    fault: Fault
    at_seconds: float
    saw: dict[int, tuple[float, str]]
    back_seconds: float | None
    ranks_before: int
    ranks_after: int
    steps_lost: int
    named: str

    @property
    def noticed_seconds(self) -> float | None:
        return min((seconds for seconds, _ in self.saw.values()), default=None)


@dataclass(frozen=True)
class ElasticRun:
    """A job under torchrun and what happened to it.

    Attributes:
        moments: In order.
        transport: "network namespaces" or "loopback".
        why: Why not namespaces, in a sentence; else empty.
        output: What agents and ranks wrote, by host, one agent after the other.
    """

    moments: Sequence[Moment]
    transport: str
    why: str
    output: dict[int, str]

    @property
    def is_done(self) -> bool:
        """Whether a rank came to the end of its script."""
        return any(moment.what == "done" for moment in self.moments)

    @property
    def result(self) -> dict[str, Any]:
        """What rank 0 noted when it was done; empty if it never was."""
        done = [m.more for m in self.moments if m.what == "done" and m.rank == 0]
        return done[-1] if done else {}

    @property
    def recoveries(self) -> list[Recovery]:
        """One for each fault that happened."""
        at = [i for i, moment in enumerate(self.moments) if moment.what == "fault"]
        ends = [*at[1:], len(self.moments)]
        return [_recovery(self.moments, start, end) for start, end in zip(at, ends, strict=True)]

    def worlds(self) -> list[tuple[float, float, int, int]]:
        """Each generation of ranks: seconds of its first and last step, its ranks, its first step."""
        found: list[tuple[float, float, int, int]] = []
        for moment in self.moments:
            if moment.what == "start" and moment.rank == 0:
                found.append(
                    (moment.seconds, moment.seconds, moment.more["world"], moment.more["step"])
                )
            elif moment.what == "step" and found:
                found[-1] = (found[-1][0], moment.seconds, *found[-1][2:])
        return found


def _recovery(moments: Sequence[Moment], start: int, end: int) -> Recovery:
    fault = moments[start]
    before, after = moments[:start], moments[start:end]
    saw = {
        m.rank: (m.seconds - fault.seconds, _first_sentence(m.more.get("text", "")))
        for m in reversed(after)
        if m.what == "saw" and m.rank is not None
    }
    starts = [m for m in after if m.what == "start"]
    back = [m for m in after if m.what == "step" and starts and m.seconds > starts[0].seconds]
    done = max(
        (m.more["step"] for m in moments[:end] if m.what == "step" and m not in back), default=-1
    )
    return Recovery(
        Fault(**fault.more),
        fault.seconds,
        dict(sorted(saw.items())),
        back[0].seconds - fault.seconds if back else None,
        _world(before),
        _world(starts[:1], _world(before)),
        max(0, done + 1 - starts[0].more["step"]) if starts else 0,
        _named(before, after, saw),
    )


def _named(
    before: Sequence[Moment], after: Sequence[Moment], saw: dict[int, tuple[float, str]]
) -> str:
    """Who fell silent while the others saw an error."""
    world = _world(before)
    hosts = {m.rank: m.host for m in before if m.what == "start" and m.rank is not None}
    silent = [rank for rank in range(world) if rank not in saw]
    if not saw:
        return "nobody: no rank saw an error"
    if not silent:
        return "the network: every rank is there and waited for the others"
    host = hosts.get(silent[0])
    whole = all(rank in silent for rank, at in hosts.items() if at == host and rank < world)
    agents = [m for m in after if m.what == "agent started" and m.host == host]
    if whole and (agents or not any(m.what == "start" and m.host == host for m in after)):
        return f"host {host}: its agent and its ranks fell silent"
    ranks = ", ".join(map(str, silent))
    return f"rank {ranks} on host {host}: it fell silent, and its agent did not"


def _first_sentence(text: str) -> str:
    """What is said, without gloo's place in its own source and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", text).partition(". ")[0]


def _world(moments: Iterable[Moment], otherwise: int = 0) -> int:
    sizes = [m.more["world"] for m in moments if m.what == "start"]
    return sizes[-1] if sizes else otherwise


def read_journal(path: Path, start: int = 0) -> tuple[list[Moment], int]:
    """Whole lines of a journal from a byte on, and the byte to go on from. Seconds are the clock's.

    Raises:
        JournalError: a line is none of a journal's.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read()
    except OSError as error:
        raise JournalError(f"The journal {path.name} cannot be read: {error.strerror}.") from error
    whole = text[: text.rfind(b"\n") + 1]
    return [_moment(line, path.name) for line in whole.splitlines()], start + len(whole)


def _moment(line: bytes, journal: str) -> Moment:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = ""
    if problem := _problem(row):
        raise JournalError(
            f"The journal {journal} holds {line[:80].decode(errors='replace')!r}: {problem}. Each line "
            "is a JSON object, written by one call: `what` with its numbers, and `at`, time.time()."
        )
    return Moment(row.pop("at"), row.pop("what"), row.pop("host", None), row.pop("rank", None), row)


def _problem(row: Any) -> str:
    if not isinstance(row, dict):
        return "that is no JSON object; did two writers mix their lines, or was it cut off?"
    what = row.get("what")
    if not isinstance(what, str) or what not in NUMBERS:
        return f"`what` is {what!r}, and none of {', '.join(NUMBERS)}"
    if not isinstance(at := row.get("at"), (int, float)) or not math.isfinite(at):
        return f"`at` is {at!r}, and no number of seconds"
    numbers = {name: row.get(name) for name in NUMBERS[what]}
    numbers |= {name: row[name] for name in ("host", "rank") if row.get(name) is not None}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            return f"`{name}` is {number!r}, and no whole number"
    return "" if isinstance(row.get("text", ""), str) else "`text` is no text"


check_public(globals())
