"""The most that a piece of code takes at one time, where there is no model or step to meter yet."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from utils.checked import check_public
from utils.memory.source import source_for

__all__ = ["allocated_peak"]


def allocated_peak(function: Callable[[], Any]) -> int:
    """Call a function; the most bytes of CPU tensors that it took beside what was there.

    Files that are mapped into memory (`mmap=True`) are the system's, and not counted.
    """
    source = source_for(torch.device("cpu"))
    source.start()
    try:
        kept = function()  # alive until the recording ends
    finally:
        events = source.stop()
    del kept
    return max(accumulate((event.bytes for event in events), initial=0))


check_public(globals())
