"""The searches of labs 01 and 02: a learner's function looks for the largest batch, call by call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from utils.labs.cases import judge
from utils.labs.kinds import NotYet, whole
from utils.labs.verdict import not_yet


class Stopped(Exception):
    """Ends a search that asks too often, or for too much."""


class CountedPeak:
    """A peak by batch that counts its calls, and stops whoever goes too far.

    Args:
        peak: Bytes by batch; never falls.
        most_calls: One more is refused.
        most_bytes: A larger peak is what the machine does not have.
    """

    def __init__(
        self, peak: Callable[[int], int], most_calls: int, most_bytes: float = math.inf
    ) -> None:
        self.calls: list[int] = []
        self.stopped = ""  # also where the learner's code catches the exception
        self._peak, self._most_calls, self._most_bytes = peak, most_calls, most_bytes

    def __call__(self, batch: int) -> int:
        self.calls.append(batch)
        if len(self.calls) > self._most_calls:
            self.stopped = self.stopped or "calls"
        found = self._peak(batch)
        if found > self._most_bytes:
            self.stopped = self.stopped or "bytes"
        if self.stopped:
            raise Stopped(f"the search was stopped: too many {self.stopped}")
        return found


@dataclass(frozen=True)
class Search:
    """One search: its peak, its limit, and what the verdict says of it."""

    peak: Callable[[int], int]
    limit: int
    says: str
    nudge: str = ""

    @property
    def right(self) -> int:
        """The largest batch whose peak is within the limit; 0 if there is none."""
        most = 1
        while self.peak(most) <= self.limit:
            most *= 2
        return max((b for b in range(1, most) if self.peak(b) <= self.limit), default=0)


def most_calls(
    function: Callable[..., object],
    searches: Sequence[Search],
    *,
    counted: Callable[[Search], CountedPeak],
    nudge: Callable[[int, int, CountedPeak], str],
    stopped: dict[str, tuple[str, str]],
) -> int:
    """The most calls that a learner's function took in a search, if it finds all.

    Args:
        function: Takes a peak by batch, and a limit.
        searches: Each with its right answer.
        counted: Makes the peak that is called.
        nudge: On what was found, what is right, and the calls.
        stopped: Note and nudge for each reason of `CountedPeak.stopped`.

    Raises:
        NotYet: a search found another batch, or was stopped.
    """
    most = 0
    for search in searches:
        peak = counted(search)
        try:
            found = function(peak, search.limit)
        except Stopped:
            found = None
        if peak.stopped:
            note, hint = stopped[peak.stopped]
            raise NotYet(not_yet(note, got=f"batches {peak.calls}", nudge=hint))
        found = whole("a whole number of items").returned(found)
        hint = nudge(found, search.right, peak) or search.nudge
        if verdict := judge(found, search.right, search.says, nudge=hint):
            raise NotYet(verdict)
        most = max(most, len(peak.calls))
    return most
