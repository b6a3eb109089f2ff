"""A memory limit that holds on every device: enforced on CUDA, found in the timeline elsewhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from utils.memory.timeline import Crossing, MemoryTimeline
from utils.units import format_bytes, parse_bytes

# How libraries say that memory is short where PyTorch raises a plain RuntimeError. cuDNN, whose
# convolutions ask for workspace, says that no engine is left.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|ALLOC_FAILED|unable to find an engine", re.IGNORECASE
)


class OverBudgetError(torch.OutOfMemoryError):
    """A step wants more memory than its budget; `crossing` is the event that goes over."""

    def __init__(self, message: str, crossing: Crossing | None = None) -> None:
        super().__init__(message)
        self.crossing = crossing


@dataclass(frozen=True)
class Budget:
    """A limit in bytes. `measure(..., within="16GB")` makes one, and takes one."""

    limit_bytes: int

    def check(self, timeline: MemoryTimeline) -> None:
        """Raise the error that a device of this size would have raised.

        Raises:
            OverBudgetError: naming the phase, the module and the category that grew.
        """
        crossing = timeline.first_crossing(self.limit_bytes)
        if crossing is not None:
            raise OverBudgetError(_message(crossing), crossing)

    def fits(self, timeline: MemoryTimeline) -> bool:
        """Whether the step stays within the limit."""
        return timeline.peak_bytes <= self.limit_bytes

    @contextlib.contextmanager
    def enforced(self, device: torch.device) -> Iterator[None]:
        """Cap the CUDA allocator while inside; elsewhere nothing can be capped.

        Raises:
            OverBudgetError: the step ran out of the capped memory.
        """
        if device.type != "cuda":
            yield
            return
        before = torch.cuda.get_per_process_memory_fraction(device)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        fraction = min(1.0, self.limit_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OverBudgetError(
                f"The step does not fit in {format_bytes(self.limit_bytes)}: {error}"
            ) from error
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory was short, in the words of PyTorch or a library."""
    return isinstance(error, torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def budget(limit: str | int | Budget) -> Budget:
    """A memory budget such as `budget("24GB")` or `budget("16GiB")`; a budget is given back.

    Raises:
        ValueError: the text is no size.
    """
    return limit if isinstance(limit, Budget) else Budget(parse_bytes(limit))


def _message(crossing: Crossing) -> str:
    where = f" in module '{crossing.module}'" if crossing.module else ""
    return (
        f"Out of memory: {format_bytes(crossing.wanted_bytes)} more for {crossing.category} "
        f"during {crossing.phase}{where} makes {format_bytes(crossing.alive_bytes)}, "
        f"over the budget of {format_bytes(crossing.limit_bytes)}. "
        "Try a smaller batch, or a technique that shrinks this category."
    )
