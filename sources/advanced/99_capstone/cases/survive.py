"""Case "survive": the failure log of a run on 256 GPUs; a rate with its interval, and an order."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from utils.labs.cases import judge, scored
from utils.labs.kinds import number, one_of, several, whole
from utils.labs.verdict import Verdict, correct, not_yet
from utils.planner.goodput import DAY, best_interval_seconds, working_share
from utils.units import Evidence

from .sheet import Gains, Sheet, interval

NODES, GPUS = 32, 8
_RUNS = {
    1: (60, 9.0, 20.0, 600.0, 11),
    2: (45, 16.0, 60.0, 900.0, 23),
    3: (90, 6.0, 120.0, 1500.0, 7),
}
ORDER = (
    "stop every rank",
    "take the node out",
    "put the spare in",
    "load the newest checkpoint that verifies",
    "compare the loss with the log",
)
BAD_SHARE = 0.4  # of the failures, on one node
ONE_EVENT_SECONDS = 600.0  # what follows a failure within ten minutes is its echo
LOUD = 0  # the node of rank 0, where every collective that ends is reported
Z = 1.645  # of a 90% interval


class Line(NamedTuple):
    """One line of the log."""

    seconds: float
    node: int
    what: str


@dataclass(frozen=True)
class FailureLog:
    """What stopped a run.

    Attributes:
        seed: Whose.
        days: That the run took.
        lines: The log, in order.
        checkpoint_seconds: That one checkpoint stops the training for.
        restart_seconds: From a failure to training again, lost work aside.
    """

    seed: int
    days: int
    lines: tuple[Line, ...]
    checkpoint_seconds: float
    restart_seconds: float

    @property
    def node_days(self) -> float:
        """Nodes times days."""
        return float(NODES * self.days)

    def __str__(self) -> str:
        rows = [
            f"  day {line.seconds / DAY:6.3f}  node {line.node:>2}  {line.what}"
            for line in self.lines[:14]
        ]
        return "\n".join(
            [
                f"70B on 256 GPUs ({NODES} nodes of {GPUS}) ran for {self.days} days. A checkpoint stops it for {self.checkpoint_seconds:.0f} s, "
                f"a restart takes {self.restart_seconds:.0f} s.",
                f"Its log (simulated) has {len(self.lines)} lines, in case.lines; the first of them:",
                *rows,
                "A failure of one node ends collectives on others minutes later: within ten minutes it is one event.",
                "How many failures were there; how many per 1,000 node-days, as a 90% interval; which node goes to repair;",
                "how many minutes of work between checkpoints; which share of the time is then work; and what is done, in",
                f"which order: {', '.join(sorted(ORDER))}?",
            ]
        )


@functools.cache
def data(seed: int) -> FailureLog:
    """The log of a seed: exponential times, one node that fails more than its share, and echoes.

    The node of rank 0 echoes each failure, so that most lines are no sign of a bad node.
    """
    days, rate, checkpoint, restart, bad = _RUNS[seed]
    chance = random.Random(10 + seed)
    lines, now = [], 0.0
    while True:
        now += chance.expovariate(rate * NODES / 1000) * DAY + restart
        if now > days * DAY:
            break
        node = bad if chance.random() < BAD_SHARE else chance.randrange(NODES)
        lines.append(
            Line(
                now,
                node,
                chance.choice(
                    (
                        "Xid 79: GPU has fallen off the bus",
                        "Xid 63: ECC row remapping",
                        "node does not answer",
                        "link down: mlx5_3",
                    )
                ),
            )
        )
        for other in (LOUD, *chance.sample(range(1, NODES), chance.randrange(1, 4))):
            lines.append(
                Line(now + chance.uniform(5, 500), other, "NCCL watchdog: collective timed out")
            )
    return FailureLog(seed, days, tuple(sorted(lines)), checkpoint, restart)


def events(log: FailureLog) -> list[Line]:
    """The first line of each failure."""
    found: list[Line] = []
    for line in log.lines:
        if not found or line.seconds - found[-1].seconds > ONE_EVENT_SECONDS:
            found.append(line)
    return found


def mean_seconds(log: FailureLog) -> float:
    """Between two failures of the whole job."""
    return log.days * DAY / len(events(log))


def _verdict(log: FailureLog, answer: Mapping[str, Any]) -> Verdict:
    found = events(log)
    bad = Counter(line.node for line in found).most_common(1)[0][0]
    loud = Counter(line.node for line in log.lines).most_common(1)[0][0]
    problem = (
        judge(
            answer["failures"],
            len(found),
            "the failures",
            expected="how many",
            wrong={
                len(
                    log.lines
                ): "Those are the lines. A rank that waits for a dead one is an echo, not a failure."
            },
            nudge="Group lines that lie within ten minutes of the first of their group.",
        )
        or _wrong_rate(log, *answer["per 1,000 node-days"])
        or judge(
            answer["node to repair"],
            bad,
            "the node",
            expected="the one that fails first most often",
            wrong={} if loud == bad else {loud: "It has most lines. How many of them are echoes?"},
            nudge="Count the first line of each failure by node.",
        )
    )
    return (
        problem
        or _wrong_interval(log, answer)
        or _wrong_order(answer["order"])
        or _right(log, answer)
    )


def _wrong_rate(log: FailureLog, low: float, high: float) -> Verdict | None:
    count = len(events(log))
    rate, width = 1000 * count / log.node_days, 2 * 1000 * Z * math.sqrt(count) / log.node_days
    if not low < high:
        return not_yet(
            "the rate",
            got=f"{low:.3g} to {high:.3g}",
            expected="low and high",
            nudge=f"{count} events are a sample. How far off may their rate be?",
        )
    if not low <= rate <= high:
        return not_yet(
            "the rate",
            got=f"{low:.3g} to {high:.3g}",
            expected="an interval with the rate of the log in it",
            nudge="1,000 x failures / (nodes x days).",
        )
    if not 0.7 * width <= high - low <= 1.5 * width:
        return not_yet(
            "the width of the interval",
            got=f"{high - low:.2g}",
            expected="that of 90%",
            nudge="Counts scatter by their square root: n - 1.645 sqrt(n) to n + 1.645 sqrt(n).",
        )
    return None


def _wrong_interval(log: FailureLog, answer: Mapping[str, Any]) -> Verdict | None:
    mean, d = mean_seconds(log), log.checkpoint_seconds
    best = best_interval_seconds(d, mean)
    share = working_share(best, d, log.restart_seconds, mean)
    return judge(
        answer["minutes between checkpoints"],
        best / 60,
        "the minutes",
        relative=0.1,
        expected="minutes of work",
        wrong={
            math.sqrt(2 * d * mean / NODES)
            / 60: "The mean time between failures of the job is that of all nodes together already.",
            math.sqrt(d * mean) / 60: "Young's formula has a 2 in it.",
            best: "Those are seconds.",
        },
        nudge="Young and Daly: about sqrt(2 x checkpoint x mean time between failures).",
    ) or judge(
        answer["share of work"],
        share,
        "the share of work",
        within=0.01,
        expected="a share of 1",
        wrong={1 - share: "That is what is lost."},
        nudge="Checkpoints, the restart, and half an interval of lost work for each failure: working_share(...).",
    )


def _wrong_order(order: tuple[str, ...]) -> Verdict | None:
    if sorted(order) != sorted(ORDER):
        return not_yet(
            "the order", got=f"{len(order)} steps", expected="each of the five steps once"
        )
    told = {
        "stop every rank": "Ranks that live on wait in a collective, or write over what you need. What comes first?",
        "take the node out": "A spare beside a sick node starts the same failure again.",
        "put the spare in": "The job needs all of its ranks before it can load anything.",
        "load the newest checkpoint that verifies": "What is trained on, before there is a loss to compare?",
        "compare the loss with the log": "A resume that is not exact shows in the loss: look before you leave it alone.",
    }
    place = next((place for place, step in enumerate(order) if step != ORDER[place]), None)
    return (
        None
        if place is None
        else not_yet(f"step {place + 1}", got=order[place], nudge=told[ORDER[place]])
    )


def _right(log: FailureLog, answer: Mapping[str, Any]) -> Verdict:
    mean, d = mean_seconds(log), log.checkpoint_seconds
    mine = working_share(60 * answer["minutes between checkpoints"], d, log.restart_seconds, mean)
    best = working_share(best_interval_seconds(d, mean), d, log.restart_seconds, mean)
    return correct(
        "a rate with its interval, and five steps",
        score=scored(round(100 * mine, 2), round(100 * best, 2), "% of the time is work"),
    )


def _gains(log: FailureLog, answer: Mapping[str, Any]) -> Gains:
    return Gains(evidence=Evidence.SIMULATED)


SHEET = Sheet(
    "A run that survives",
    "advanced",
    "failures, checkpoints and the order of a restart",
    "70B on 256 GPUs, and nodes fail: how often do you save, and what do you do when it happens?",
    ("16", "15"),
    {
        "failures": whole("a number of failures"),
        "per 1,000 node-days": interval("two numbers: low, high"),
        "node to repair": whole("a node"),
        "minutes between checkpoints": number("a number of minutes"),
        "share of work": number("a share of 1"),
        "order": several(one_of(*ORDER, what="a step"), what="a list of steps"),
    },
    data,
    _verdict,
    _gains,
)
