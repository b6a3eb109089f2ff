"""The figure of lesson 01's second section: what PyTorch's counters and the driver's say of one card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.memory import Measurement
from utils.units import GIB
from utils.views.style import course_style, empty_figure

__all__ = ["Counters", "draw_counters"]

# Color, hatch, edge; in grey any two neighbours differ in hatch or clearly in brightness.
LOOKS = {
    "allocated: tensors": ("#3f90da", "", "white"),
    "reserved, unallocated": ("#ffa90e", "//", "white"),
    "outside, in this process": ("#717581", "||", "white"),
    "outside, not told apart": ("#717581", "xx", "white"),
    "other processes": ("#c8ccd4", "..", "black"),
    "free": ("#ffffff", "", "black"),
}
NARROWEST_NAMED = 0.065  # of the longest bar: a narrower part gets no number


class Counters(NamedTuple):
    """What is counted on one card, in GiB, each with what the one before it counts."""

    allocated: float
    reserved: float
    process: float | None  # None where nobody counted the process by itself
    used: float
    card: float = 0  # 0 where the rest of the card is left out

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
    """
    widest = max(sum(counters.parts()) for counters in cards.values())
    with course_style():
        figure, axes = empty_figure(height=1.5 + 0.7 * len(cards))
        for row, counters in enumerate(cards.values()):
            _draw_bar(axes, row, counters, NARROWEST_NAMED * widest)
        axes.set_yticks(range(len(cards)), [name.replace(" (", "\n(") for name in cards])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.grid(False, axis="y")
        axes.set_xlabel("memory of the card (GiB)")
        axes.set_title(title)
        names = [
            Patch(facecolor=color, hatch=hatch, edgecolor=edge, label=name)
            for name, (color, hatch, edge) in LOOKS.items()
        ]
        figure.legend(handles=names, loc="outside right upper")
    return figure


def _draw_bar(axes: Axes, row: int, counters: Counters, narrowest: float) -> None:
    left = 0.0
    for width, (color, hatch, edge) in zip(counters.parts(), LOOKS.values(), strict=True):
        if width:
            axes.barh(row, width, 0.6, left, color=color, hatch=hatch, edgecolor=edge)
        if width > narrowest:
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "linewidth": 0}
            text = f"{width:.2f}"
            axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=9, bbox=box)
        left += width
    axes.text(left, row, f"  {left:.2f} GiB", va="center", fontsize=11)


check_public(globals())
