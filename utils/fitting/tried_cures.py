"""A change of a recipe, and what a simulation found that it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.units import GIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from utils.fitting.verdict import FitVerdict

NOTICED_SECONDS = 0.01  # less than this is below what predictions tell apart
GAINS_BYTES = GIB // 100  # a saving below this is none: it would be printed as 0.00 GiB


@dataclass(frozen=True)
class Cure:
    """A change of a recipe.

    Attributes:
        name: In a few words.
        changes: Fields of the recipe, and what they become.
        line: The line of code, with the names that the script has.
        costs: What it costs beside time.
    """

    name: str
    changes: Mapping[str, Any]
    line: str
    costs: str


@dataclass(frozen=True)
class Tried:
    """One cure, or several together, simulated.

    Attributes:
        cures: What was changed.
        verdict: What the step needs then.
        saved_bytes: How much less it takes from the card than before.
        added_seconds: How much longer a step is predicted to take, where several cards share a text the
            seconds of all of them together; None where that is not known.
    """

    cures: tuple[Cure, ...]
    verdict: FitVerdict
    saved_bytes: int
    added_seconds: float | None

    @property
    def name(self) -> str:
        return " + ".join(cure.name for cure in self.cures)

    @property
    def gains(self) -> bool:
        """Whether it saves anything here."""
        return self.saved_bytes >= GAINS_BYTES

    @property
    def is_safe(self) -> bool:
        """Whether it fits with more to spare than simulations were off by."""
        return self.verdict.fits and not self.verdict.is_close

    @property
    def seconds_per_gib(self) -> float:
        """By what cures are sorted: those of unknown time come last."""
        if self.added_seconds is None:
            return float("inf")
        return self.added_seconds / (self.saved_bytes / GIB)

    def row(self) -> dict[str, str]:
        """As a row of a table."""
        costs = [cure.costs for cure in self.cures]
        host_bytes = self.verdict.measurement.host_bytes or 0
        if host_bytes >= MIB:
            costs.append(f"{format_bytes(host_bytes)} of tensors on the host")
        return {
            "cure": self.name,
            "needed": format_bytes(self.verdict.needed_bytes),
            "saved": format_bytes(self.saved_bytes),
            "added a step": added(self.added_seconds),
            **self.verdict.times,
            "fits": self.verdict.word,
            "costs": "; ".join(costs),
            "line": "; ".join(cure.line for cure in self.cures),
        }


def compatible(cures: Sequence[Cure]) -> bool:
    """Whether no two of them change the same field."""
    fields = [name for cure in cures for name in cure.changes]
    return len(fields) == len(set(fields))


def added(seconds: float | None) -> str:
    """Predicted seconds in words: what no formula has a term for is no zero."""
    if seconds is None:
        return "not known"
    if seconds == 0:
        return "not modelled"
    if abs(seconds) < NOTICED_SECONDS:
        return f"under {format_seconds(NOTICED_SECONDS)}"
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
