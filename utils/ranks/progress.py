"""The bar of `run_ranks`: which ranks have finished, and what they draw over and over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from types import TracebackType

from tqdm.auto import tqdm

DELAY_SECONDS = 2.0
REDRAW_SECONDS = 0.25
_FORMAT = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"


class _Bar(tqdm):
    """Without tqdm's thread that watches over bars: this one is drawn four times a second."""

    monitor_interval = 0


class RankProgress:
    """A bar that appears after two seconds, on a terminal or in a notebook, and nowhere else.

    Printed lines go through `write`, so that they never stand in the middle of the bar. With
    TQDM_DISABLE=1 there is no bar: tests that compare the outputs of cells want none.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size, self._started = world_size, time.monotonic()
        self._bar: _Bar | None = None

    def __enter__(self) -> RankProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        raised: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, finished: int, live: str) -> None:
        """Bring the bar up to date: ranks that have finished, and a text to stand beside it."""
        if self._bar is None and time.monotonic() - self._started >= DELAY_SECONDS:
            self._bar = self._new_bar()
        if self._bar is not None:
            self._bar.set_postfix_str(live, refresh=False)
            self._bar.update(finished - self._bar.n)

    def write(self, lines: Iterable[str]) -> None:
        """Print whole lines above the bar."""
        text = "".join(f"{line}\n" for line in lines)
        if not text:
            return
        if self._bar is not None:
            self._bar.clear()
        sys.stdout.write(text)
        if self._bar is not None:
            sys.stdout.flush()  # before the bar, which stands in another stream
            self._bar.refresh()

    def _new_bar(self) -> _Bar:
        # None: not where its stream is no terminal. In a notebook tqdm draws a widget all the same.
        disable = True if os.environ.get("TQDM_DISABLE") else None
        # miniters=0: it draws the texts of ranks anew also while no further rank has finished.
        bar = _Bar(
            total=self._world_size,
            desc="ranks",
            unit="rank",
            bar_format=_FORMAT,
            leave=False,
            mininterval=REDRAW_SECONDS,
            miniters=0,
            disable=disable,
        )
        if not bar.disable:
            bar.start_t -= DELAY_SECONDS
        return bar
