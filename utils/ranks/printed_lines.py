"""What ranks print, shown while they run: whole lines, each with its rank; bars apart."""

from __future__ import annotations

import re

from utils.ranks.killable import LOST_PRINTS, KillableProcess

LIVE_CHARACTERS = 100
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours, and moves of the cursor


class RankLines:
    """One rank's prints as `[rank 2] ...`, each line once, when it is complete."""

    def __init__(self, rank: int, process: KillableProcess) -> None:
        self._rank, self._process, self._taken = rank, process, 0

    def take(self) -> list[str]:
        """The lines that have been completed since the last call."""
        return self._take(self._process.output.rfind(b"\n") + 1)

    def take_rest(self) -> list[str]:
        """Everything that is left, also a last line that was never ended."""
        lost = [f"[rank {self._rank}] {LOST_PRINTS}"] if self._process.has_lost_prints else []
        return self._take(len(self._process.output)) + lost

    @property
    def live(self) -> str:
        """What stands in a line that the rank draws again and again with `\\r`; "" without one."""
        line = self._process.output[self._taken :].decode(errors="replace")
        if "\r" not in line:
            return ""
        text = _ESCAPE.sub("", _standing(line)).strip()
        return f"rank {self._rank}: {text}"[:LIVE_CHARACTERS] if text else ""

    def _take(self, end: int) -> list[str]:
        text = self._process.output[self._taken : end].decode(errors="replace")
        self._taken = max(self._taken, end)
        standing = map(_standing, text.split("\n"))
        return [f"[rank {self._rank}] {line}" for line in standing if line.strip()]


def _standing(line: str) -> str:
    """What a terminal shows of a line that was drawn several times."""
    return line.rstrip("\r").rpartition("\r")[2]
