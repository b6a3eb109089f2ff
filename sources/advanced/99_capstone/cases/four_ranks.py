"""Case "four_ranks": four GPUs of one node that scale badly, from their trace."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.cases import judge, scored
from utils.labs.kinds import Kind, number, one_of, whole
from utils.labs.slow_jobs import GRADIENT_BYTES, SlowJob
from utils.labs.verdict import Verdict, correct
from utils.traffic.cost import AlphaBeta
from utils.units import Evidence

from .sheet import Gains, Sheet

RANKS = 4
_PCIE = AlphaBeta(20e-6, 20e9)
_JOBS = {
    1: SlowJob(nodes=RANKS, network=_PCIE, load_seconds=tuple((r, 0.26) for r in range(RANKS))),
    2: SlowJob(nodes=RANKS, network=_PCIE, slow_nodes=((2, 1.45),)),
    3: SlowJob(nodes=RANKS, network=_PCIE, bucket_bytes=GRADIENT_BYTES),
}
CAUSES = ("data loading", "one slow rank", "all-reduce not hidden", "too little work")
_RIGHT = {1: ("data loading", "all"), 2: ("one slow rank", 2), 3: ("all-reduce not hidden", "all")}
_FIELD = {1: "load_seconds", 2: "slow_nodes", 3: "bucket_bytes"}
_TOLD = {
    "data loading": "What does every rank do before its forward pass, with its GPU idle?",
    "one slow rank": "A collective ends for all at once. Who computes while the others wait?",
    "all-reduce not hidden": "How many all-reduces are there, and can one start before its last gradient is there?",
}


@dataclass(frozen=True)
class FourRanks:
    """One step of four ranks, as a profiler's trace.

    Attributes:
        seed: Whose.
        events: As in a trace file: "pid" is the rank, "name" what it did, "ts" and "dur" microseconds.
        one_process_seconds: A step of one process alone, with as many images as one rank has here.
        all_reduces: In a step, all of the same size.
        gradient_bytes: That they reduce together.
    """

    seed: int
    events: tuple[Mapping[str, Any], ...]
    one_process_seconds: float
    all_reduces: int
    gradient_bytes: int = GRADIENT_BYTES

    def __str__(self) -> str:
        rows = [
            f"  rank {e['pid']}: {e['name']:<24} from {e['ts'] / 1e3:7.1f} to {(e['ts'] + e['dur']) / 1e3:7.1f} ms"
            for e in self.events
        ]
        return "\n".join(
            [
                f"Four GPUs of one node train with DDP. One process alone takes {1e3 * self.one_process_seconds:.0f} ms a step.",
                f"{self.all_reduces} all-reduces a step, of {GRADIENT_BYTES / self.all_reduces / 1e6:,.0f} MB. The trace (simulated), also in "
                "case.events:",
                *rows,
                'What is the scaling efficiency, what costs it, on which rank (or "all"), and what',
                "would the efficiency be without that cause, with DDP's buckets of 25 MiB?",
            ]
        )


@functools.cache
def data(seed: int) -> FourRanks:
    """The trace of a seed."""
    trace = _JOBS[seed].step()
    events = [
        {
            "pid": rank,
            "name": s.kind.replace("a node", "a rank"),
            "ts": 1e6 * s.start_seconds,
            "dur": 1e6 * (s.end_seconds - s.start_seconds),
        }
        for rank, row in enumerate(trace.stretches)
        for s in row
    ]
    return FourRanks(seed, tuple(events), SlowJob(nodes=1).step().step_seconds, trace.buckets)


def _efficiency(job: SlowJob) -> float:
    return SlowJob(nodes=1).step().step_seconds / job.step().step_seconds


def _verdict(case: FourRanks, answer: Mapping[str, Any]) -> Verdict:
    job, (cause, rank) = _JOBS[case.seed], _RIGHT[case.seed]
    now, after = _efficiency(job), _efficiency(job.fixed(_FIELD[case.seed]))
    problem = (
        judge(
            answer["efficiency"],
            now,
            "the efficiency",
            relative=0.02,
            expected="a share of 1",
            wrong={
                4 * now: "That is the speedup. The efficiency is its share of four.",
                1 / now: "That is how much longer a step takes. Turn it over.",
            },
            nudge="Four ranks do four times the work of one: one process's step over this step.",
        )
        or judge(answer["cause"], cause, "the cause", expected="another one", nudge=_TOLD[cause])
        or judge(
            answer["rank"],
            rank,
            "the rank",
            expected='its number, or "all"',
            nudge="Is one rank different from the others before anybody waits?",
        )
        or judge(
            answer["efficiency without it"],
            after,
            "the efficiency without the cause",
            relative=0.02,
            expected="a share of 1",
            wrong={1.0: "The last bucket is reduced after backward: something always shows."},
            nudge="Which milliseconds of the step go away? Time that backward hides gives nothing back.",
        )
    )
    return problem or correct(
        f"{cause}: {now:.0%} becomes {after:.0%}",
        score=scored(
            round(100 * answer["efficiency without it"]), round(100 * after), "% after the cure"
        ),
    )


def _gains(case: FourRanks, answer: Mapping[str, Any]) -> Gains:
    return Gains(bytes_sent=2 * (RANKS - 1) / RANKS * GRADIENT_BYTES, evidence=Evidence.SIMULATED)


def rank_or_all(most: int) -> Kind:
    """A rank's or node's number, or "all"."""

    def read(value: Any) -> int | str:
        if isinstance(value, str) and value.strip().lower() == "all":
            return "all"
        return whole().read(value)

    return Kind(f'a number below {most}, or "all"', read)


SHEET = Sheet(
    "Four ranks, and not four times as fast",
    "beginner",
    "scaling efficiency from a trace",
    "Scaling is slow: how do you find out why?",
    ("04",),
    {
        "efficiency": number("a share of 1"),
        "cause": one_of(*CAUSES, what="a cause"),
        "rank": rank_or_all(RANKS),
        "efficiency without it": number("a share of 1"),
    },
    data,
    _verdict,
    _gains,
)
