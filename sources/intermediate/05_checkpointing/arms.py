"""Ways to run one step, beside what a card leaves: tensors at the peak, and what is reserved for them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.units import GIB, Category
from utils.views.style import LOOKS, course_style, print_evidence

from .moments import deciding

__all__ = ["draw_arms"]

NAMED = 0.5  # GiB: a smaller part is not in the legend
INSIDE = 1.7  # GiB: a narrower part has no number
NEAR_LOSS = (
    Category.LOGITS_AND_LOSS,
    Category.TEMPORARIES,
)  # told together: at the loss both are logits
HEIGHT = 0.56  # of a bar, in rows
COLUMNS = (1.16, 1.32, 1.44)  # where the sums stand, in lengths of the longest bar


def draw_arms(runs: Sequence[Measurement], room_bytes: int, *, margin: float, title: str) -> Figure:
    """A bar of tensors for each run, inside of an outline of what its allocator reserves.

    Args:
        runs: simulated steps on one card; each is named by what it does.
        room_bytes: what the card leaves beside its context.
        margin: by how much a GPU may reserve more than was simulated; what fits without it, and
            not with it, is open.
        title: with the setting.

    Raises:
        ValueError: no run, or one without an allocator's figure.
    """
    if not runs:
        raise ValueError("draw_arms() needs a run or more.")
    if missing := [run.name for run in runs if run.reserved_bytes is None]:
        raise ValueError(f"Nothing says what is reserved in {missing}: simulate them on a GPU.")
    reserved = [(run.reserved_bytes or 0) / GIB for run in runs]
    room = room_bytes / GIB
    longest = max([*reserved, room])
    with course_style():
        figure = Figure(figsize=(9.0, 1.9 + 0.58 * len(runs)), layout="constrained")
        axes = figure.add_subplot()
        for row, (run, outline) in enumerate(zip(runs, reserved, strict=True)):
            _draw_bar(axes, row, run)
            axes.barh(row, outline, height=HEIGHT, fill=False, edgecolor="black", lw=1.0)
            verdict = "no" if outline > room else "yes" if margin * outline <= room else "open"
            _say(axes, row, longest, (run.peak_bytes / GIB, outline), verdict)
        axes.axvline(room, color="black", ls="--", lw=1.5, zorder=4)
        axes.set_yticks(range(len(runs)), [f"{run.name}\n({deciding(run)})" for run in runs])
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.set_ylim(len(runs) - 0.5, -1.0)  # the first run on top, and room for the line's name
        axes.text(room - 0.4, -0.72, f"{room:.2f} GiB usable", ha="right", va="center", fontsize=10)
        axes.set_xlim(0, COLUMNS[-1] * longest)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= longest])
        axes.spines.bottom.set_bounds(0, longest)
        axes.set_xlabel("memory (GiB)", loc="left")
        axes.grid(False, axis="y")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        _draw_legend(figure, runs, margin)
        print_evidence(figure, [run.evidence for run in runs], [run.device for run in runs])
    return figure


def _draw_bar(axes: Axes, row: int, run: Measurement) -> None:
    """The parts, each with its number where it is wide enough."""
    left = 0.0
    for category, width in _parts(run).items():
        look = LOOKS[category]
        axes.barh(row, width, left=left, height=HEIGHT, color=look.color, hatch=look.hatch, lw=0)
        if width >= INSIDE:
            _number(axes, left + width / 2, row, f"{width:.1f}")
        left += width


def _parts(run: Measurement) -> dict[Category, float]:
    """GiB of each category, temporaries with the logits where there are any."""
    parts = {category: run.breakdown[category] / GIB for category in run.breakdown}
    logits, temporaries = NEAR_LOSS
    if parts.get(logits, 0.0) >= NAMED:
        parts[logits] += parts.pop(temporaries, 0.0)
    return parts


def _number(axes: Axes, x: float, y: float, text: str) -> None:
    box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "alpha": 0.85, "linewidth": 0}
    axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box, zorder=5)


def _say(axes: Axes, row: int, longest: float, sums: tuple[float, float], verdict: str) -> None:
    """Right of the bars: tensors, what is reserved, and the verdict that the second decides."""
    told = {"tensors": f"{sums[0]:.1f}", "reserved": f"{sums[1]:.1f}", "fits": verdict}
    for place, (name, text) in zip(COLUMNS, told.items(), strict=True):
        for y, words in ((row, text), (-0.72, name))[: 2 if row == 0 else 1]:
            axes.text(place * longest, y, words, ha="right", va="center", fontsize=10)


def _draw_legend(figure: Figure, runs: Sequence[Measurement], margin: float) -> None:
    shown = [c for c in Category if any(_parts(run).get(c, 0.0) >= NAMED for run in runs)]
    names = {c: str(c) for c in shown} | {NEAR_LOSS[0]: "logits, loss and their temporaries"}
    parts = [Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, label=names[c]) for c in shown]
    marks = [
        Patch(fill=False, edgecolor="black", label="reserved"),
        Line2D([], [], color="black", ls="--", label="the card"),
    ]
    figure.legend(
        handles=[*parts, *marks],
        loc="outside lower center",
        ncols=4,
        fontsize=10,
        title=f"fits: open if less than {100 * (margin - 1):.0f}% of what is reserved is to spare",
        title_fontsize=10,
    )


check_public(globals())
