"""What a case of the capstone is: its data by seed, the parts of its answer, its judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from utils.labs.kinds import Kind, WrongKind, number, several, whole
from utils.labs.verdict import Verdict
from utils.units import Evidence

SEEDS = (1, 2, 3)
MINUTES = 20.0
TIERS = ("beginner", "intermediate", "advanced")


@dataclass(frozen=True)
class Gains:
    """What a right answer of a case is worth, for the page of results; 0 where it has none.

    Attributes:
        bytes_saved: On the fullest device, against what the brief came with.
        bytes_sent: By one rank in one step, as answered.
        usd: Of the run, as answered.
        evidence: Where these numbers are from.
    """

    bytes_saved: float = 0.0
    bytes_sent: float = 0.0
    usd: float = 0.0
    evidence: Evidence = Evidence.PREDICTED


@dataclass(frozen=True)
class Sheet:
    """One case.

    Attributes:
        title: Its heading.
        tier: One of `TIERS`.
        skill: What a right answer shows, in a few words.
        question: The interview question that it asks.
        lessons: Numbers of the lessons it draws on.
        parts: The keys of an answer, and what each holds.
        data: The brief and its data for a seed; shown as text.
        verdict: Judges an answer, whose parts were read, against the data.
        gains: What a right answer is worth.
    """

    title: str
    tier: str
    skill: str
    question: str
    lessons: tuple[str, ...]
    parts: Mapping[str, Kind]
    data: Callable[[int], Any]
    verdict: Callable[[Any, Mapping[str, Any]], Verdict]
    gains: Callable[[Any, Mapping[str, Any]], Gains]


def interval(what: str) -> Kind:
    """Two finite numbers, low and high, as floats."""

    def read(value: Any) -> tuple[float, float]:
        low, high = several(number(), 2, what).read(value)
        try:
            found = float(low), float(high)
        except OverflowError:  # an int that no float can hold
            raise WrongKind("Those are no finite numbers.") from None
        if not all(map(math.isfinite, found)):
            raise WrongKind("Those are no finite numbers.")
        return found

    return Kind(what, read)


def seed_kind() -> Kind:
    """A seed of the capstone: 1, 2 or 3."""

    def read(value: Any) -> int:
        found = whole().read(value)
        if found not in SEEDS:
            raise WrongKind(f"A seed is one of {', '.join(map(str, SEEDS))}.")
        return found

    return Kind("the seed of your case", read)
