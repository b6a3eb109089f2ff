"""The timeline of a step, and beside it what the step before has left."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from utils.checked import check_public
from utils.memory import Measurement
from utils.units import Category, format_bytes
from utils.views import draw_timeline
from utils.views.style import LOOKS, byte_unit, course_style

__all__ = ["draw_from_before", "dropped_bytes"]

BEFORE = 0.05  # how much is drawn before the step, as a part of the step's width
IN_TWO_LINES = "optimizer step"  # of a CNN it is shorter than its name is wide


def dropped_bytes(measurement: Measurement) -> int:
    """The gradients that the step before left and this one lets go before its forward."""
    timeline = measurement.timeline
    forward_ns = next(span.start_ns for span in timeline.spans if span.name == "forward")
    left, kept = timeline.at(timeline.start_ns), timeline.at(forward_ns)
    return left[Category.GRADIENTS] - kept[Category.GRADIENTS]


def draw_from_before(measurement: Measurement, *, title: str = "") -> Figure:
    """The timeline of a step, beginning a little before it, with the drop of the old gradients named."""
    with course_style():
        figure = draw_timeline(measurement, title=title)
        axes = figure.axes[0]
        end = axes.get_xlim()[1]
        top = _stack_what_was_left(axes, measurement, -BEFORE * end)
        axes.set_xlim(-BEFORE * end, end)
        _move_phase_names(axes)
        axes.annotate(
            f"zero_grad frees\n{format_bytes(dropped_bytes(measurement))}",
            (0, top),
            xytext=(0.01, 0.94),
            textcoords="axes fraction",
            va="top",
            fontsize=10,
            arrowprops={"arrowstyle": "->", "relpos": (0.15, 0)},
        )
        axes.set_title(title or f"{measurement.name}: one step", pad=36)
    return figure


def _stack_what_was_left(axes: Axes, measurement: Measurement, left: float) -> float:
    """Draw what was alive before the step, from `left` to 0; its height."""
    timeline = measurement.timeline
    unit_bytes, _ = byte_unit(timeline.peak_bytes)
    floor = 0.0
    for category, size_bytes in timeline.at(timeline.start_ns).items():
        top = floor + size_bytes / unit_bytes
        look = LOOKS[category]
        axes.fill_between(
            [left, 0], floor, top, facecolor=look.color, hatch=look.hatch, edgecolor="white", lw=0
        )
        floor = top
    axes.plot([left, 0], [floor, floor], color="black", lw=1)
    return floor


def _move_phase_names(axes: Axes) -> None:
    """They stand at fractions of the step's width; now there is more than the step."""
    for text in axes.texts:
        if isinstance(text, Annotation) and text.xycoords == "axes fraction":
            x, y = text.xy
            text.xy = ((x + BEFORE) / (1 + BEFORE), y)
            text.set_position(text.xy)
            if text.get_text() == IN_TWO_LINES:
                text.set_text(IN_TWO_LINES.replace(" ", "\n"))


check_public(globals())
