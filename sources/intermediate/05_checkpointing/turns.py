"""Steps that are timed in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from utils.checked import check_public

__all__ = ["taking_turns"]


def taking_turns(
    steps: Mapping[str, Callable[[], Any]], *, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each step, one for each round.

    Raises:
        ValueError: `rounds` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; give 1 or more.")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return seconds


check_public(globals())
