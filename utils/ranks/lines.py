"""What ranks print, shown while they run: whole lines, each with its rank."""

from __future__ import annotations

import sys

from utils.ranks.killable import KillableProcess


class RankLines:
    """Shows one rank's prints line by line as `[rank 2] ...`."""

    def __init__(self, rank: int, process: KillableProcess) -> None:
        self._prefix, self._process, self._shown = f"[rank {rank}] ", process, 0

    def show(self) -> None:
        """Write the lines that are complete."""
        self._write(self._process.output.rfind(b"\n") + 1)

    def show_rest(self) -> None:
        """Write everything, also a last line that was never ended."""
        self._write(len(self._process.output))

    def _write(self, end: int) -> None:
        text = self._process.output[self._shown : end].decode(errors="replace")
        self._shown = max(self._shown, end)
        for line in text.split("\n"):
            last = line.rstrip("\r").rpartition("\r")[2]  # what a progress bar left standing
            if last.strip():
                sys.stdout.write(f"{self._prefix}{last}\n")
