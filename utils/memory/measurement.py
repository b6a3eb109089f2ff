"""What a measurement holds: one frozen record, whatever device or evidence it comes from."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from utils.memory.events import LibraryMemory
from utils.memory.timeline import Breakdown, MemoryTimeline
from utils.units import Evidence, format_bytes, format_seconds


@dataclass(frozen=True)
class Measurement:
    """Memory and speed of one training (or inference) step.

    `step_seconds` are the timed steps, run without the meter; `items` are processed per step.
    `allocator_bytes` is what else the device's allocator says, by name (on CUDA allocated,
    reserved and the driver's own figure; on CPU the process's resident memory). `traffic` lists
    what one rank of a simulated world communicates (`utils.traffic.collectives.Traffic`).
    `host_timeline` is what the program placed in host memory, where that is counted apart.
    `library_memory` is where in a first step a simulated GPU's libraries take their own.
    """

    name: str
    timeline: MemoryTimeline
    evidence: Evidence
    device: str
    step_seconds: tuple[float, ...] = ()
    items: int = 1
    unit: str = "items"
    source: str = ""
    allocator_bytes: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    traffic: tuple[Any, ...] = ()
    host_timeline: MemoryTimeline | None = None
    library_memory: tuple[LibraryMemory, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Peak of what the caching allocator held of the GPU, free blocks included; None on CPU.

        Of the same evidence as the rest: the allocator's own word, or its simulation. What is
        above the peak is fragmentation, and cached blocks.
        """
        return self.allocator_bytes.get("reserved peak")

    @property
    def host_bytes(self) -> int | None:
        """Peak of what the step kept in host memory; None where that is not counted apart."""
        if self.host_timeline is not None:
            return self.host_timeline.peak_bytes
        return self.allocator_bytes.get("host peak")

    @property
    def host(self) -> Measurement:
        """The same step in host memory alone, by category.

        Raises:
            ValueError: host memory was not counted apart, or without categories (a simulation).
        """
        if self.host_timeline is None:
            raise ValueError(
                "This measurement has no host memory by category: call measure() with host=."
            )
        return replace(
            self, name=f"{self.name}: host", timeline=self.host_timeline, host_timeline=None
        )

    @property
    def peak_phase(self) -> str:
        return self.timeline.peak_phase

    @property
    def breakdown(self) -> Breakdown:
        """Bytes by category at the peak."""
        return self.timeline.peak

    @property
    def median_step_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def spread_seconds(self) -> tuple[float, float] | None:
        """The fastest and the slowest timed step."""
        return (min(self.step_seconds), max(self.step_seconds)) if self.step_seconds else None

    @property
    def items_per_second(self) -> float | None:
        median = self.median_step_seconds
        return self.items / median if median else None

    @property
    def throughput(self) -> str:
        """Items per second to three digits, such as "2,010 images/s"; empty without timed steps."""
        rate = self.items_per_second
        return f"{float(f'{rate:.3g}'):,.10g} {self.unit}/s" if rate else ""

    def __str__(self) -> str:
        lines = [
            # A simulated device already says so.
            f"{self.name}: {self.evidence} on {self.device.removeprefix('a simulated ')}",
            f"peak {format_bytes(self.peak_bytes)}, reached in {self.peak_phase}",
            str(self.breakdown),
            *self._speed_lines(),
            *self.notes,
        ]
        return "\n".join(lines)

    def _speed_lines(self) -> list[str]:
        if self.median_step_seconds is None or self.spread_seconds is None:
            return []
        low, high = (format_seconds(seconds) for seconds in self.spread_seconds)
        return [
            f"{self.throughput}; median step "
            f"{format_seconds(self.median_step_seconds)} ({low} to {high}, "
            f"{len(self.step_seconds)} steps)"
        ]
