"""A sitting of the capstone: cases opened against the clock, answers handed in, a page of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.display import display

from utils.files import write_whole
from utils.labs.checking import check
from utils.labs.minutes_in_words import minute_of, time_left
from utils.labs.scoreboard import scoreboard, scoreboard_path
from utils.labs.verdict import Report

from .cases import CASES, MINUTES, SEEDS, Gains
from .countdown import countdown
from .results_page import Result, results_html


@dataclass
class _Entry:
    """What is known of one case of a sitting."""

    opened: float
    tries: int = 0
    solved_seconds: float | None = None
    report: Report | None = None
    gains: Gains = field(default_factory=Gains)


@dataclass
class Sitting:
    """One learner's sitting. Time is shown and never graded: a late answer counts, and says so.

    Args:
        learner: Who sits; stands on the page of results.
        seed: 1, 2 or 3: which data every case has.
        minutes: For one case.
        clock: Gives the seconds that passed.
    """

    learner: str = ""
    seed: int = 1
    minutes: float = MINUTES
    clock: Callable[[], float] = time.monotonic
    entries: dict[str, _Entry] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.seed not in SEEDS:
            raise ValueError(f"A sitting has seed {', '.join(map(str, SEEDS))}; got {self.seed!r}.")
        if not self.minutes > 0:
            raise ValueError(f"A case takes more than 0 minutes; got {self.minutes}.")

    def open(self, name: str, *, widget: bool = True) -> Any:
        """Start a case's clock, show its brief, and give its data. A second call starts no clock.

        Args:
            name: The case.
            widget: Also show a clock with buttons; without, print(sitting) says what is left.

        Raises:
            ValueError: there is no case of that name.
        """
        sheet = CASES[self._known(name)]
        self.entries.setdefault(name, _Entry(self.clock()))
        print(
            f"{sheet.title} ({sheet.tier}, seed {self.seed}): {self._left(name)}. {sheet.question}\n"
        )
        found = sheet.data(self.seed)
        print(found)
        if widget:
            display(countdown(self.minutes, name))
        return found

    def hand_in(self, name: str, answer: Mapping[str, Any]) -> Report:
        """Check an answer: a dict with the parts that the case asks for.

        Raises:
            ValueError: there is no case of that name, or it was not opened.
        """
        if self._known(name) not in self.entries:
            raise ValueError(f"{name} was not opened: sitting.open({name!r}) starts its clock.")
        parts = {"seed": self.seed, **answer} if isinstance(answer, Mapping) else answer
        report, entry = check(f"99.{name}", parts), self.entries[name]
        if entry.solved_seconds is None:
            self._note(name, report, parts)
        return report

    def solve(self, name: str, answer: Callable[[Any], Mapping[str, Any]]) -> Report:
        """Open a case without a word, hand in what a function makes of its data, and say how it went.

        Raises:
            ValueError: there is no case of that name.
        """
        self.entries.setdefault(self._known(name), _Entry(self.clock()))
        return self.hand_in(name, answer(CASES[name].data(self.seed)))

    def _note(self, name: str, report: Report, parts: Any) -> None:
        entry = self.entries[name]
        entry.report = report
        entry.tries += report.status.value != "not attempted"
        if report.is_correct:
            entry.solved_seconds = self.clock() - entry.opened
            sheet = CASES[name]
            read = {part: kind.of(parts[part]) for part, kind in sheet.parts.items()}
            entry.gains = sheet.gains(sheet.data(self.seed), read)

    def results(self) -> list[Result]:
        """Every case, in the order of the tiers, opened or not."""
        return [self._result(name) for name in CASES]

    def _result(self, name: str) -> Result:
        sheet, entry = CASES[name], self.entries.get(name)
        if entry is None or entry.report is None:
            return Result(name, sheet, "not opened" if entry is None else "opened")
        seconds, verdict = entry.solved_seconds, entry.report.verdict
        if seconds is None:
            return Result(name, sheet, str(entry.report.status), tries=entry.tries)
        late = seconds > 60 * self.minutes
        return Result(
            name,
            sheet,
            "solved, after the end" if late else "solved",
            verdict.score or verdict.note,
            seconds,
            entry.tries,
            entry.gains,
        )

    def page(self, path: str | Path | None = None) -> Path:
        """Write the results as one HTML page that needs nothing beside it.

        Args:
            path: Where; None for capstone.html beside the scoreboard, in my_labs/.

        Raises:
            OSError: it cannot be written there.
        """
        path = scoreboard_path().parent / "capstone.html" if path is None else Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        board = [row.cells() for row in scoreboard().rows]
        write_whole(path, results_html(self.learner, self.seed, self.results(), board).encode())
        return path

    def _known(self, name: str) -> str:
        if name not in CASES:
            raise ValueError(f"There is no case {name!r}; there are {', '.join(CASES)}.")
        return name

    def _left(self, name: str) -> str:
        left = 60 * self.minutes - (self.clock() - self.entries[name].opened)
        return time_left(left)

    def __str__(self) -> str:
        solved = sum(result.is_solved for result in self.results())
        rows = [f"{solved} of {len(CASES)} cases solved, seed {self.seed}"]
        for name, entry in self.entries.items():
            done = entry.solved_seconds
            state = self._left(name) if done is None else f"solved in {minute_of(done)}"
            rows.append(
                f"  {name:<16}{state}, {entry.tries} {'try' if entry.tries == 1 else 'tries'}"
            )
        if not self.learner.strip():
            rows.append('no name yet: sitting.learner = "Your Name" puts it on the page')
        return "\n".join(rows)
