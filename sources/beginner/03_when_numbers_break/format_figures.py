"""Number formats drawn: their ranges on a line, their digits, and the bits of one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.views.style import course_style, empty_figure

from .number_formats import FORMATS, NumberFormat

MOST_DRAWN = 1000  # numbers of the right panel
RANGE, FADED, EXPONENT, SIGN = "#3f90da", "#b9d5f0", "#ffa90e", "#c9c9c9"
FLIPS = (
    "no bit",
    "sign bit",
    "first exponent bit",
    "last exponent bit",
    "first mantissa bit",
    "last mantissa bit",
)


def draw_formats(
    names: Sequence[str] = tuple(FORMATS),
    *,
    up_to: float = 1.5,
    title: str = "What each format can hold: range on the left, digits on the right",
) -> Figure:
    """Left, the range of each format on a logarithmic line; right, its numbers from 1 upwards.

    Where they lie closer than can be drawn, they are a bar.

    Args:
        names: of the formats.
        up_to: the last number of the right panel.
        title: of the figure.

    Raises:
        ValueError: a name is no format of the course, or the last number is not above 1.
    """
    if not 1 < up_to <= MOST_DRAWN:
        raise ValueError(f"draw_formats: up_to is {up_to}; it must be above 1, to {MOST_DRAWN:,}.")
    formats = [_format(name) for name in names]
    with course_style():
        figure = Figure(figsize=(11, 1.3 + 0.55 * len(formats)), layout="constrained")
        line, digits = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
        for row, form in enumerate(formats):
            _draw_range(line, row, form)
            _draw_digits(digits, row, form, up_to)
        line.set_yticks(range(len(formats)), [form.name for form in formats])
        line.set_ylim(len(formats) - 0.4, -0.6)
        line.set_xscale("log")
        line.set_xticks([1e-40, 1e-20, 1, 1e20, 1e40])
        line.set_xlabel("size of a number (light: subnormal, fewer digits)")
        digits.set_xticks([1, (1 + up_to) / 2, up_to])
        digits.set_xlim(1 - 0.05 * (up_to - 1), up_to + 0.05 * (up_to - 1))
        digits.set_xlabel(f"each number from 1 to {up_to:g}")
        for axes in (line, digits):
            axes.grid(False, axis="y")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def _draw_range(axes: Axes, row: int, form: NumberFormat) -> None:
    edges = [form.smallest, form.smallest_normal, form.largest]
    for left, right, color in zip(edges, edges[1:], (FADED, RANGE), strict=False):
        axes.barh(row, right - left, left=left, height=0.5, color=color)
    axes.text(edges[2], row, f" {edges[2]:.5g}", va="center", ha="left", fontsize=10)
    axes.text(edges[0], row, f"{edges[0]:.1e} ", va="center", ha="right", fontsize=10)
    low, high = FORMATS["fp32"].smallest, FORMATS["fp32"].largest
    axes.set_xlim(low * 1e-14, high * 1e18)  # room for the numbers at both ends


def _draw_digits(axes: Axes, row: int, form: NumberFormat, up_to: float) -> None:
    width = up_to - 1
    if form.epsilon < width / 64:  # ticks would touch, and make patterns that no format has
        axes.barh(row, width, left=1, height=0.32, color="black")
        told = f"one every {form.epsilon:.2g}"
        middle = 1 + width / 2
        axes.text(middle, row, told, va="center", ha="center", fontsize=9, color="white")
        return
    steps = np.arange(1, up_to + width * 1e-6, form.epsilon)
    axes.plot(steps, [row] * len(steps), "|", ms=16, mew=1.0, color="black")


def draw_bits(format: str, value: float, flip: str = "no bit") -> tuple[Figure, str]:
    """The bits that hold a number, what they are worth, and what one flipped bit makes of it.

    Args:
        format: such as "bf16".
        value: is rounded to the format first.
        flip: one of `FLIPS`.

    Returns:
        The figure and its alternative text.

    Raises:
        ValueError: no such format or bit.
    """
    form = _format(format)
    bits = _flipped(form, form.encode(value), flip)
    told = _sentences(form, value, bits, flip)
    with course_style():
        figure, axes = empty_figure(11 * max(form.bits, 24) / 32, 2.9)
        for place, (bit, before) in enumerate(zip(bits, form.encode(value), strict=True)):
            _draw_bit(axes, form, place, bit)
            if bit != before:
                axes.add_patch(
                    Rectangle((place, 0), 1, 1, fill=False, edgecolor="black", lw=3, zorder=3)
                )
        widths = [1, form.exponent_bits, form.mantissa_bits]
        centres = [0.5, 1 + widths[1] / 2, 1 + widths[1] + widths[2] / 2]
        for x, name in zip(centres, ("sign", "exponent", "mantissa"), strict=True):
            axes.text(x, 1.25, name, ha="center", fontsize=11)
        for line, text in enumerate(told):
            axes.text(0, -0.6 - 0.6 * line, text, fontsize=12, va="center")
        axes.set(xlim=(-0.1, max(form.bits, 24) + 0.1), ylim=(-2.3, 1.7))
        axes.axis("off")
        of_which = "" if flip == "no bit" else f", the {flip} flipped"
        axes.set_title(f"{value:.9g} in {form.name}{of_which}")
    return figure, f"The bits {bits} of {form.name}. " + " ".join(told)


def _draw_bit(axes: Axes, form: NumberFormat, place: int, bit: str) -> None:
    color = SIGN if place == 0 else EXPONENT if place <= form.exponent_bits else RANGE
    box = Rectangle((place, 0), 1, 1, facecolor=color, edgecolor="white", linewidth=2)
    axes.add_patch(box)
    axes.text(place + 0.5, 0.48, bit, ha="center", va="center", fontsize=12, family="monospace")


def _flipped(form: NumberFormat, bits: str, flip: str) -> str:
    places = [None, 0, 1, form.exponent_bits, 1 + form.exponent_bits, form.bits - 1]
    if flip not in FLIPS:
        raise ValueError(f"flip is {flip!r}; take one of {', '.join(FLIPS)}.")
    place = places[FLIPS.index(flip)]
    if place is None:
        return bits
    return bits[:place] + ("1" if bits[place] == "0" else "0") + bits[place + 1 :]


def _sentences(form: NumberFormat, value: float, bits: str, flip: str) -> list[str]:
    held, field = form.decode(bits), int(bits[1 : 1 + form.exponent_bits], 2)
    steps = int(bits[1 + form.exponent_bits :], 2)
    told = [f"The bits hold {held:.9g}."]
    if flip != "no bit":
        told[0] = f"With the {flip} flipped the bits hold {held:.9g}."
    elif math.isfinite(held) and value:
        told[0] += f" Relative error: {abs(held - value) / abs(value):.1e}."
    if not math.isfinite(held):
        return [*told, "This pattern is kept for what is no finite number."]
    whole = f"{'1' if field else '0'} + {steps}/{2**form.mantissa_bits}"
    told.append(f"{'-' if bits[0] == '1' else ''}2^({max(field, 1)} - {form.bias}) x ({whole})")
    kind = "a normal number" if field else "a subnormal number, or zero"
    return [*told, f"It is {kind}; the next one is {form.spacing(held):.3g} away."]


def _format(name: str) -> NumberFormat:
    if name not in FORMATS:
        raise ValueError(f"{name!r} is no format of the course; take one of {', '.join(FORMATS)}.")
    return FORMATS[name]


__all__ = ["draw_bits", "draw_formats"]

check_public(globals())
