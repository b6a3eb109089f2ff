"""A timed round for workshops: the seven patients of lab 10 in a random order, against the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from utils.clinic.lab_ward import WARD, case_file, lab_patient
from utils.labs.checking import check
from utils.labs.minutes_in_words import minute_of, time_left
from utils.labs.verdict import Report
from utils.units import format_bytes


@dataclass
class Round:
    """One team's round. Time is shown and never graded: a late answer counts, and says so.

    Args:
        minutes: how long the round takes.
        seed: decides the order of the patients; teams with one seed have one order.
        clock: gives the seconds that passed.
    """

    minutes: float = 35
    seed: int = 0
    clock: Callable[[], float] = time.monotonic
    solved: dict[int, float] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"A round takes more than 0 minutes; got {self.minutes}.")
        self.order = random.Random(self.seed).sample(sorted(WARD), len(WARD))
        self._start = self.clock()

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - (self.clock() - self._start)

    def next(self) -> int | None:
        """Show the next patient that is not cured; its number, or None after the last."""
        number = next((n for n in self.order if n not in self.solved), None)
        if number is None:
            print(f"The ward is empty.\n{self}")
            return None
        patient = lab_patient(number)
        print(f'Patient {number}, {self._left()}: "{patient.complaint}"')
        print(f"budget {format_bytes(patient.limit_bytes)}\n\n{case_file(number)}")
        return number

    def answer(self, number: int, **parts: Any) -> Report:
        """Check an answer: `answer(3, cause=..., category=..., line=..., cure=...)`.

        Raises:
            ValueError: there is no patient of that number.
        """
        if number not in WARD:
            raise ValueError(f"There is no patient {number!r}. There are {sorted(WARD)}.")
        report = check(f"10.patient_{number}", parts)
        if number not in self.solved:
            self.tries[number] = self.tries.get(number, 0) + 1
            if report.is_correct:
                self.solved[number] = self.clock() - self._start
        return report

    def _left(self) -> str:
        return time_left(self.seconds_left)

    def __str__(self) -> str:
        rows = [f"{len(self.solved)} of {len(WARD)} cured, {self._left()}"]
        for number, seconds in self.solved.items():
            late = "" if seconds <= 60 * self.minutes else ", after the end"
            tries = self.tries[number]
            rows.append(
                f"patient {number}: {minute_of(seconds)}, {tries} "
                f"{'try' if tries == 1 else 'tries'}{late}"
            )
        return "\n".join(rows)
