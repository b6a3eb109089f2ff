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
# Two that PyTorch raises without a class of their own, known by their first words.
_NO_FORM = "There was no fake impl registered"
_REAL_TENSOR = "Please convert all Tensors to FakeTensors first"


class SimulationError(RuntimeError):
    """The step cannot be simulated as it is. The message says where, and what to do instead."""


@contextlib.contextmanager
def explained(watcher: StorageWatcher) -> Iterator[None]:
    """Turn the exceptions of tensors without data into sentences."""
    try:
        yield
    except (*_NEEDS_VALUES, *_UNSUPPORTED, AssertionError, RuntimeError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise SimulationError(f"{_place(watcher)} {reason}") from error


def _reason(error: Exception) -> str | None:
    """What went wrong and what to do; None if the simulation is not to blame."""
    if isinstance(error, _NEEDS_VALUES):
        return (
            f"asks for the value of a tensor ({error.func}), and simulated tensors have none. "
            "Leave .item(), printing, and branches on values out of the step, or return the "
            "tensor instead."
        )
    if isinstance(error, _UNSUPPORTED) or str(error).startswith(_NO_FORM):
        return (
            f"runs an operation that cannot be simulated: {error} "
            "Replace it, or run this step for real at a small size."
        )
    if str(error).startswith(_REAL_TENSOR):
        return (
            "uses a tensor that was made before the simulation and holds real data. Make the "
            "inputs inside the step, and all else inside build()."
        )
    return None


def _place(watcher: StorageWatcher) -> str:
    module = watcher.failed_in
    return f"The module '{module}'" if module else "The step, outside of any module,"
