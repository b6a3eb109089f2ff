"""What cannot be simulated, said with its place and a way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from utils.simulation.refusals import NO_FORM, NotSimulated, first_line, sentence
from utils.simulation.source_lines import Place, failed, files
from utils.simulation.stand_ins import NEED_VALUES
from utils.simulation.watcher import StorageWatcher

_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_FSDP1 = "fsdp/fully_sharded_data_parallel.py"


class SimulationError(RuntimeError):
    """The step cannot be simulated as it is. The message says where, and what to do instead."""


@contextlib.contextmanager
def explained(watcher: StorageWatcher) -> Iterator[None]:
    """Turn the exceptions of tensors without data into sentences."""
    try:
        yield
    except SimulationError:
        raise
    except Exception as error:
        place = failed(error)
        reason = _reason(error) or _after(watcher.stand_ins.assumed, error)
        if reason is None:
            if place.file:
                error.add_note(f"In the simulated step, at {place}.")
            raise
        where = _where(watcher, place)
        raise SimulationError(f"{where} {reason}") from error


def _reason(error: Exception) -> str | None:
    """What went wrong and what to do; None if the simulation is not to blame."""
    if isinstance(error, NotSimulated):
        return str(error)
    if isinstance(error, NEED_VALUES):
        return (
            f"asks for the value of a tensor ({error.func}), and simulated tensors have none. "
            "Leave .item(), printing, and branches on values out of the step, return the "
            "tensor instead, or say what to assume: simulate(..., values={'loss': 1.0}) by the "
            "name at that line, values=True for every condition and mask."
        )
    if any(_FSDP1 in file for file in files(error)):
        return (
            "runs FullyShardedDataParallel (FSDP1), which points parameters into the memory of one "
            "flat tensor, and simulated tensors have none. Shard the model with fully_shard (FSDP2)."
        )
    if isinstance(error, _UNSUPPORTED) or NO_FORM in str(error):
        return (
            f"runs an operation that cannot be simulated: {first_line(error)} Say what its "
            "results look like with torch.library.register_fake, replace it, or run this step for "
            "real at a small size."
        )
    return sentence(error)


def _after(assumed: Place, error: Exception) -> str | None:
    """What to say of a program's own error after a value was taken for granted."""
    if not assumed.file:
        return None
    return (
        f"raises {type(error).__name__} ({first_line(error)}) after a value was assumed at {assumed}. "
        f"Say another: simulate(..., values={{'{assumed.short}': 0, '*': 1}}); or run this step for real."
    )


def _where(watcher: StorageWatcher, place: Place) -> str:
    module = watcher.failed_in
    if watcher.in_build:
        what = "Build()"
    else:
        what = f"The module '{module}'" if module else "The step, outside of any module,"
    return f"At {place}: {what[0].lower()}{what[1:]}" if place.file else what
