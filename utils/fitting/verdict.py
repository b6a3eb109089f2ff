"""Whether a step fits a card, with what margin, and where its bytes go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from utils.fitting.recipe import Recipe
from utils.memory.measurement import Measurement
from utils.simulation.devices import simulated_device
from utils.units import GIB, MIB, format_bytes, format_seconds

# Of 21 published peaks of such recipes 19 lie within this share of the simulated one, half of them
# within 3.3% (`evidence.validation.fine_tunes_simulated`, which a test holds against it).
MARGIN = 0.12


@dataclass(frozen=True)
class FitVerdict:
    """What one recipe needs on one card.

    Attributes:
        name: Of the model, or of what was tried.
        card: The GPU, by its name in the catalog.
        measurement: The simulated step.
        usable_bytes: What the card leaves beside its context.
        seconds: (low, middle, high) predicted for a step; None where no formula is known.
        recipe: How it was trained; None for functions of the caller's own.
        notes: What the step leaves out, and what was assumed in it.
    """

    name: str
    card: str
    measurement: Measurement
    usable_bytes: int
    seconds: tuple[float, float, float] | None = None
    recipe: Recipe | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def peak_bytes(self) -> int:
        """The most that tensors take together."""
        return self.measurement.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """What the caching allocator takes from the card for them: this decides."""
        reserved = self.measurement.reserved_bytes
        return self.peak_bytes if reserved is None else reserved

    @property
    def spare_bytes(self) -> int:
        """What is left of the card; below zero for what is missing."""
        return self.usable_bytes - self.needed_bytes

    @property
    def room(self) -> str:
        """The card's usable memory as figures take a limit."""
        return f"{self.usable_bytes / GIB:.2f} GiB"

    @property
    def fits(self) -> bool:
        """Whether the step runs, as far as a simulation can tell."""
        return self.spare_bytes >= 0

    @property
    def is_close(self) -> bool:
        """Whether the difference is below what simulations were off by."""
        return abs(self.spare_bytes) < MARGIN * self.needed_bytes

    @property
    def word(self) -> str:
        """For a table: "yes", "just" (closer than simulations are exact) or "no"."""
        return ("just" if self.is_close else "yes") if self.fits else "no"

    @property
    def gap_bytes(self) -> int:
        """What the allocator takes beside the tensors: blocks between them that fit none."""
        return self.needed_bytes - self.peak_bytes

    @property
    def times(self) -> dict[str, str]:
        """The predicted seconds for a table, with their interval, and the tokens of a second."""
        if self.seconds is None:
            return {"a step": "not known", "tokens a second": "not known"}
        low, middle, high = self.seconds
        tokens = f"{self.recipe.step_tokens / middle:,.0f}" if self.recipe else "not known"
        said = f"{format_seconds(middle)} ({format_seconds(low)} to {format_seconds(high)})"
        return {"a step": said, "tokens a second": tokens}

    @property
    def sentence(self) -> str:
        """The verdict, its margin, and where that comes from."""
        size, room = format_bytes(self.needed_bytes), format_bytes(self.usable_bytes)
        what = f"{self.name} {{}} one {self.card}: the step needs {size} (simulated) of {room}"
        off = f"nine in ten published peaks lay within {MARGIN:.0%} of simulated ones"
        if self.is_close:
            way = "may fit" if self.fits else "hardly fits"
            side = "to spare" if self.fits else "missing"
            return f"{what.format(way)}, {format_bytes(abs(self.spare_bytes))} {side}, and {off}."
        if self.fits:
            return f"{what.format('fits')}, {format_bytes(self.spare_bytes)} to spare; {off}."
        return (
            f"{what.format('does not fit')}, {format_bytes(-self.spare_bytes)} are missing; {off}."
        )

    @property
    def speed(self) -> str:
        """The predicted seconds in words."""
        if self.seconds is None:
            return "Seconds: no formula is known for this model or recipe."
        low, middle, high = (format_seconds(value) for value in self.seconds)
        words = f"A step takes about {middle} ({low} to {high}, predicted)"
        if self.recipe is None:
            return f"{words}."
        return f"{words}: {self.recipe.step_tokens / self.seconds[1]:,.0f} tokens a second."

    @property
    def host(self) -> str:
        """What waits in the host's memory, in words; empty for less than a MiB: counters of steps."""
        size = self.measurement.host_bytes or 0
        return f"The host holds {format_bytes(size)} beside it (simulated)." if size >= MIB else ""

    def named(self, name: str) -> Measurement:
        """The simulated step under another name, for a figure."""
        return replace(self.measurement, name=name)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON: bytes and seconds as numbers."""
        return {
            "model": self.name,
            "card": self.card,
            "recipe": str(self.recipe) if self.recipe else None,
            "fits": self.fits,
            "close": self.is_close,
            "needed_bytes": self.needed_bytes,
            "peak_bytes": self.peak_bytes,
            "usable_bytes": self.usable_bytes,
            "host_bytes": self.measurement.host_bytes,
            "peak_phase": str(self.measurement.peak_phase),
            "at_the_peak_bytes": {str(k): v for k, v in self.measurement.breakdown.items() if v},
            "step_seconds": list(self.seconds) if self.seconds else None,
            "evidence": {"bytes": "simulated", "seconds": "predicted"},
            "notes": list(self.notes),
            "sentence": self.sentence,
        }

    def __str__(self) -> str:
        parts = self.measurement.breakdown
        lines = [f"  {part!s:<22}{format_bytes(size):>12}" for part, size in parts.items() if size]
        phase, peak = self.measurement.peak_phase, format_bytes(self.peak_bytes)
        where = (
            f"Of that, tensors take {peak} at the peak, in {phase}; the allocator's gaps the rest:"
        )
        said = [self.sentence, where, *lines, self.speed, self.host, *self.notes]
        return "\n".join(filter(None, said))


def usable_bytes(card: str) -> int:
    """What a GPU of the catalog leaves beside its context.

    Raises:
        ValueError: no such GPU, or "cpu", whose memory is not counted.
    """
    usable = simulated_device(card).usable_bytes
    if usable is None:
        raise ValueError(
            "A card is a GPU of the catalog, such as 'RTX 4090'; a CPU has no limit to fit."
        )
    return usable
