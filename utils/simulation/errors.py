"""What cannot be simulated, said with its place and a way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from utils.simulation.watcher import StorageWatcher

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


class SimulationError(RuntimeError):
    """The step cannot be simulated as it is. The message says where, and what to do instead."""


@contextlib.contextmanager
def explained(watcher: StorageWatcher) -> Iterator[None]:
    """Turn the exceptions of tensors without data into sentences."""
    try:
        yield
    except _NEEDS_VALUES as error:
        raise SimulationError(
            f"{_place(watcher)} asks for the value of a tensor ({error.func}), and simulated "
            "tensors have none. Leave .item(), printing, and branches on values out of the step, "
            "or return the tensor instead."
        ) from error
    except _UNSUPPORTED as error:
        raise SimulationError(
            f"{_place(watcher)} runs an operation that cannot be simulated: {error}. "
            "Replace it, or run this step for real at a small size."
        ) from error


def _place(watcher: StorageWatcher) -> str:
    module = watcher.failed_in
    return f"The module '{module}'" if module else "The step, outside of any module,"
