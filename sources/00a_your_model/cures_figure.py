"""What each change leaves: tensors by category and the allocator's gaps, beside the card's room."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.fitting.answer_table import ranked
from utils.fitting.model_fit import Fit
from utils.fitting.verdict import MARGIN, FitVerdict
from utils.units import GIB, Category
from utils.views.style import LOOKS, course_style, print_evidence

LONGEST_LINE = 32  # letters of a row's name
VISIBLE_SHARE = 1 / 400
WORDS = {"yes": "fits", "just": "just", "no": "does not fit"}


def draw_cures(found: Fit, title: str) -> Figure:
    """A bar for the step as asked and for each change that `ranked` names, in its order."""
    rows = {"as asked": found.verdict}
    rows |= {tried.name: tried.verdict for tried in ranked(found)}
    names = [textwrap.fill(name, LONGEST_LINE) for name in rows]
    with course_style():
        figure = Figure(figsize=(10.5, 1.8 + 0.5 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        for row, verdict in enumerate(rows.values()):
            _draw_bar(axes, row, verdict)
        _draw_room(axes, found.verdict.usable_bytes / GIB)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.3 * max(verdict.needed_bytes for verdict in rows.values()) / GIB)
        axes.set_xlabel("what the allocator takes of the card (GiB)")
        axes.set_title(title, pad=22, fontsize=12)
        axes.grid(False, axis="y")
        figure.legend(handles=_handles(list(rows.values())), loc="outside right upper")
        every = [verdict.measurement for verdict in rows.values()]
        print_evidence(figure, [m.evidence for m in every], [m.device for m in every])
    return figure


def _draw_bar(axes: Axes, row: int, verdict: FitVerdict) -> None:
    left = 0.0
    for category, size in verdict.measurement.breakdown.items():
        look = LOOKS[category]
        axes.barh(row, size / GIB, left=left, height=0.6, color=look.color, hatch=look.hatch)
        left += size / GIB
    gap = verdict.gap_bytes / GIB
    axes.barh(row, gap, left=left, height=0.6, color="white", edgecolor="black", lw=1)
    text = f"{verdict.needed_bytes / GIB:.1f}, {WORDS[verdict.word]}"
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0}
    axes.annotate(text, (left + gap, row), xytext=(6, 0), textcoords="offset points", va="center",
                  fontsize=10, bbox=box, zorder=4)  # fmt: skip


def _draw_room(axes: Axes, room: float) -> None:
    """The card's room, and below it the band in which a simulation is too close to call."""
    axes.axvline(room, color="black", linestyle="--")
    axes.axvspan(room / (1 + MARGIN), room, color="#f5efd6", zorder=0)
    for text, side, shift in (("just", "right", -3), (f"room {room:.2f}", "left", 3)):
        axes.annotate(text, (room, 1), xycoords=("data", "axes fraction"), xytext=(shift, 4),
                      textcoords="offset points", ha=side, fontsize=10)  # fmt: skip


def _handles(verdicts: Sequence[FitVerdict]) -> list[Patch]:
    visible = VISIBLE_SHARE * max(verdict.peak_bytes for verdict in verdicts)
    present = [
        category
        for category in Category
        if any(v.measurement.breakdown.get(category, 0) > visible for v in verdicts)
    ]
    handles = [Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, label=str(c)) for c in present]
    gaps = Patch(facecolor="white", edgecolor="black", label="allocator's gaps")
    return [*handles, gaps]
