"""Count what this rank sends: `with traffic() as sent: step()`, then `sent.rows`.

For a worker of `run_ranks`. Payload is what a rank puts into a collective, in bytes by kind, mesh axis
and element type (`utils.traffic.collectives.Traffic`); simulations report the same rows. An
operation that the counter does not know raises `UnknownOperation`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from utils.traffic.collectives import Collective, Traffic, UnknownOperation
from utils.traffic.counter import Sent, traffic

__all__ = ["Collective", "Sent", "Traffic", "UnknownOperation", "traffic"]


class _CountsWhenCalled(ModuleType):
    """`from utils import traffic` finds this package once it is loaded, by Python's own rule, and
    the function of that name before. Either is called the same way."""

    def __call__(self) -> Any:
        return traffic()

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker of the notebook that names it travels to its rank."""
        return importlib.import_module, (__name__,)


sys.modules[__name__].__class__ = _CountsWhenCalled
