"""Lesson 01's second section: what an error, PyTorch's counters and the driver's say of one card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.memory import Measurement
from utils.rules import some
from utils.units import GIB, KIB, MIB
from utils.views.style import course_style, empty_figure

__all__ = ["Counters", "ErrorSizes", "draw_counters", "error_sizes"]

# What an OutOfMemoryError says, between the words that stand around it.
SAID = {
    "asked": r"Tried to allocate {}",
    "card": r"total capaci?ty of {}",
    "free": r"of which {} is free",
    "process": r"this process has {} memory in use",
    "allocated": r"{} is allocated by PyTorch",
    "pieces": r"{} is reserved by PyTorch but unallocated",
}
UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
SIZE = r"([\d.]+ (?:bytes|[KMG]iB))"

# Color, hatch, edge; in grey any two neighbours differ in hatch or clearly in brightness.
LOOKS = {
    "allocated: tensors, workspaces": ("#3f90da", "", "white"),
    "reserved, unallocated": ("#ffa90e", "//", "white"),
    "outside, in this process": ("#717581", "||", "white"),
    "outside: this process or others": ("#717581", "xx", "white"),
    "other processes": ("#c8ccd4", "..", "black"),
    "free": ("#ffffff", "", "black"),
}
# Of the longest bar: a narrower part has its number above, one that is narrower still has none.
NARROWEST_INSIDE, NARROWEST_NAMED = 0.065, 0.03


class ErrorSizes(NamedTuple):
    """The sizes that an `OutOfMemoryError` gives, in GiB, in the order of its text."""

    asked: float
    card: float
    free: float
    process: float
    allocated: float
    pieces: float  # reserved, and no tensor uses them

    @property
    def outside(self) -> float:
        """What this process holds beside what PyTorch reserved."""
        return self.process - self.allocated - self.pieces


def error_sizes(error: str) -> ErrorSizes:
    """What the text of CUDA's `OutOfMemoryError` says, whatever its units.

    Raises:
        ValueError: a size is missing, as where the text is cut, or names processes by their number.
    """
    found = {}
    for name, words in SAID.items():
        match = re.search(words.format(SIZE), error)
        if match is None:
            told = words.replace("?", "").format("...")
            raise ValueError(
                f"The text has no {told!r}: paste the whole of the error's message. One that names "
                "processes by number alone does not tell which is yours: write it in for yours."
            )
        count, unit = match[1].split()
        found[name] = float(count) * UNITS[unit] / GIB
    return ErrorSizes(**found)


class Counters(NamedTuple):
    """What is counted on one card, in GiB, each with what the one before it counts."""

    allocated: float
    reserved: float
    process: float | None  # None where nobody counted the process by itself
    used: float
    card: float = 0  # 0 where the rest of the card is left out

    @classmethod
    def of_error(cls, error: ErrorSizes) -> Counters:
        """The card of an `OutOfMemoryError`."""
        reserved = error.allocated + error.pieces
        return cls(error.allocated, reserved, error.process, error.card - error.free, error.card)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Counters:
        """A row that was recorded on a GPU."""
        names = ("allocated_peak_bytes", "reserved_peak_bytes", "used_on_the_device_bytes")
        allocated, reserved, used = (row[name] / GIB for name in names)
        return cls(allocated, reserved, None, used)

    @classmethod
    def of_measurement(cls, measurement: Measurement) -> Counters:
        """A step that was measured on a GPU."""
        names = ("allocated peak", "reserved peak", "used on the device")
        allocated, reserved, used = (measurement.allocator_bytes[name] / GIB for name in names)
        return cls(allocated, reserved, None, used)

    def parts(self) -> tuple[float, ...]:
        """What each counter adds, in the order of `LOOKS`."""
        outside = self.used - self.reserved
        own = None if self.process is None else self.process - self.reserved
        kinds = (0.0, outside, 0.0) if own is None else (own, 0.0, outside - own)
        free = max(self.card - self.used, 0)
        return self.allocated, self.reserved - self.allocated, *kinds, free


def draw_counters(cards: Mapping[str, Counters], *, title: str) -> Figure:
    """One bar a card, cut into what each counter adds.

    Args:
        cards: by a name that says where the numbers come from.
        title: of the figure.

    Raises:
        ValueError: there is no card.
    """
    some("draw_counters", cards=cards)
    widest = max(sum(counters.parts()) for counters in cards.values())
    with course_style():
        figure, axes = empty_figure(height=1.5 + 0.7 * len(cards))
        for row, counters in enumerate(cards.values()):
            _draw_bar(axes, row, counters, widest)
        axes.set_yticks(range(len(cards)), [name.replace(" (", "\n(") for name in cards])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.3, y=0.12)
        axes.grid(False, axis="y")
        axes.set_xlabel("memory (GiB)")
        axes.set_title(title)
        names = [
            Patch(facecolor=color, hatch=hatch, edgecolor=edge, label=name)
            for name, (color, hatch, edge) in LOOKS.items()
        ]
        figure.legend(handles=names, loc="outside right upper")
    return figure


def _draw_bar(axes: Axes, row: int, counters: Counters, widest: float) -> None:
    left = 0.0
    for width, (color, hatch, edge) in zip(counters.parts(), LOOKS.values(), strict=True):
        if width:
            axes.barh(row, width, 0.6, left, color=color, hatch=hatch, edgecolor=edge)
        if width > NARROWEST_NAMED * widest:
            _write_width(axes, row, left, width, is_inside=width > NARROWEST_INSIDE * widest)
        left += width
    whole = "card" if counters.card else "used"
    axes.text(left, row, f"  {whole} {left:.2f}", va="center", fontsize=11)


def _write_width(axes: Axes, row: int, left: float, width: float, *, is_inside: bool) -> None:
    middle, text = left + width / 2, f"{width:.2f}"
    if is_inside:
        box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "linewidth": 0}
        axes.text(middle, row, text, ha="center", va="center", fontsize=9, bbox=box)
    else:
        axes.text(middle, row - 0.33, text, ha="center", va="bottom", fontsize=9)


check_public(globals())
