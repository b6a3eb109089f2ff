"""The lesson's figures of peaks: which moment decides, and what a card holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from utils.memory.measurement import Measurement
from utils.units import GIB, Category, Phase
from utils.views.style import LOOKS, PHASE_SHADES, course_style, empty_figure

from .curves import draw_peaks

LINE_LOOKS = (  # the second line's marks are smaller, so that both are seen where they meet
    (Category.PARAMETERS, "-", "o", 11),
    (Category.ACTIVATIONS, "--", "s", 6),
)
MOMENTS = (Phase.OPTIMIZER_STEP, Phase.BACKWARD)
GROUNDS = (
    "the optimizer step decides:\n16 bits save nothing",
    "backward,\nin fp32 only",
    "backward decides:\nactivations halve",
)
HEIGHT = 4.4  # inches
ROOM = 1.25  # beside the first and the last batch, on an axis that doubles


def draw_moments(lines: Mapping[str, Sequence[Measurement]], *, title: str) -> Figure:
    """The peaks of two precisions against the batch, and the moment in which each peak lies.

    A mark is filled where the optimizer step decides, and hollow where backward does. The ground
    changes halfway between the last batch of the one kind and the first of the other.

    Args:
        lines: fp32's and then mixed precision's measurements by name, over the same batches.
        title: of the figure.
    """
    fp32, mixed = lines.values()
    batches = [m.items for m in fp32]
    with course_style():
        figure, axes = empty_figure(height=HEIGHT)
        axes.set_xscale("log", base=2)
        axes.set_xlim(batches[0] / ROOM, batches[-1] * ROOM)
        for (name, runs), look in zip(lines.items(), LINE_LOOKS, strict=True):
            _line_of_moments(axes, name, runs, look)
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        _shade(axes, [turn(runs) for runs in (fp32, mixed)])
        share = mixed[-1].peak_bytes / fp32[-1].peak_bytes
        _note(axes, f"{share:.2f} of fp32", (batches[-1], mixed[-1].peak_bytes / GIB), (10, -42))
        doubled = [batch for batch in batches if batch.bit_count() == 1]
        axes.set_xticks(doubled, [str(batch) for batch in doubled])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(f"batch size ({fp32[0].unit}), doubling at equal distances")
        axes.set_ylabel("memory at the peak (GiB)")
        axes.set_title(title)
        axes.legend(loc="center left")
    return as_simulated(figure, fp32[0].device)


def draw_on_the_card(
    lines: Mapping[str, Sequence[Measurement]],
    *,
    limits: Mapping[str, float],
    notes: Mapping[str, tuple[float, float, float, float]],
    highest_gib: float,
    title: str,
) -> Figure:
    """Simulated peaks as lines, and what cards leave as levels.

    Args:
        lines: measurements by name; one that leaves the picture says where it ends.
        limits: bytes by name.
        notes: texts, each with a point (batch, GiB) and the text's offset from it in points.
        highest_gib: where the vertical axis ends.
        title: of the figure.
    """
    figure = draw_peaks(lines, limits=limits, title=title)
    figure.set_figheight(HEIGHT)
    axes = figure.axes[0]
    axes.set_ylim(0, highest_gib)
    axes.set_ylabel("tensors at the peak (GiB)")
    for text, (batch, gib, right, up) in notes.items():
        _note(axes, text, (batch, gib), (right, up))
    for name, runs in lines.items():
        _end_of_line(axes, name, runs, highest_gib)
    axes.legend(loc="lower right")
    return as_simulated(figure, next(iter(lines.values()))[0].device)


def turn(runs: Sequence[Measurement]) -> float:
    """Between the last batch whose peak lies in the optimizer step and the first in backward.

    Halfway on an axis that doubles.
    """
    in_step = [m.items for m in runs if m.peak_phase == Phase.OPTIMIZER_STEP]
    in_backward = [m.items for m in runs if m.peak_phase == Phase.BACKWARD]
    return math.sqrt(max(in_step) * min(in_backward))


def batch_at(runs: Sequence[Measurement], peak_bytes: float) -> float:
    """The batch at which the straight line through the last two peaks has this height."""
    one, two = runs[-2:]
    slope = (two.peak_bytes - one.peak_bytes) / (two.items - one.items)
    return two.items - (two.peak_bytes - peak_bytes) / slope


def as_simulated(figure: Figure, device: str) -> Figure:
    """The figure with a corner that no reader takes for a run on the card itself.

    Args:
        figure: changed, and returned.
        device: as a measurement names it.
    """
    text = f"simulated, for a {device.removeprefix('a simulated ')} that is not here"
    figure.supxlabel(text, x=0.995, ha="right", fontsize=10, color="#555555", style="italic")
    return figure


def _line_of_moments(
    axes: Axes, name: str, runs: Sequence[Measurement], look: tuple[Category, str, str, int]
) -> None:
    category, style, marker, size = look
    color = LOOKS[category].color
    heights = [m.peak_bytes / GIB for m in runs]
    axes.plot([m.items for m in runs], heights, style, color=color, lw=2)
    for moment in MOMENTS:
        here = [m for m in runs if m.peak_phase == moment]
        axes.plot(
            [m.items for m in here],
            [m.peak_bytes / GIB for m in here],
            marker,
            color=color,
            mfc=color if moment is Phase.OPTIMIZER_STEP else "white",
            ms=size,
            label=f"{name}, peak in {'the ' * (moment is Phase.OPTIMIZER_STEP)}{moment}",
        )


def _shade(axes: Axes, crossings: Sequence[float]) -> None:
    """Shade where both peaks lie in the optimizer step, where one does, and where none does."""
    left, right = axes.get_xlim()
    edges = [left, *crossings, right]
    shades = (PHASE_SHADES[Phase.OPTIMIZER_STEP], "white", PHASE_SHADES[Phase.BACKWARD])
    for start, end, shade, text in zip(edges, edges[1:], shades, GROUNDS, strict=False):
        axes.axvspan(start, end, color=shade, lw=0, zorder=0)
        place = ((start * end) ** 0.5, 0.97)
        up = axes.get_xaxis_transform()
        axes.text(*place, text, transform=up, ha="center", va="top", fontsize=10)


def _end_of_line(axes: Axes, name: str, runs: Sequence[Measurement], highest_gib: float) -> None:
    """Its last peak in words, where a line leaves the picture."""
    last = runs[-1]
    if last.peak_bytes > highest_gib * GIB:
        place = (batch_at(runs, highest_gib * GIB), highest_gib)
        text = f"{name}, {last.items}: {last.peak_bytes / GIB:.1f} GiB, above the picture"
        _note(axes, text, place, (8, -16), side="left")


def _note(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    side: str = "right",
) -> None:
    """A text beside a point: `side` is that of the text which the offset places."""
    axes.annotate(text, point, xytext=offset, textcoords="offset points", ha=side)
