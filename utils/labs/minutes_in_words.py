"""Minutes of a timed lab in words."""

from __future__ import annotations

import math


def time_left(seconds: float) -> str:
    """How long there is still time, in minutes begun."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes} minute{'s' * (minutes > 1)} left" if seconds > 0 else "after the end"


def minute_of(seconds: float) -> str:
    """The minute in which something was done: the first one is minute 1."""
    return f"minute {max(1, math.ceil(seconds / 60))}"
