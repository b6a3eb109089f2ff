"""The lesson's drawings: numbers of each format on a line, and errors beside an outlier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["draw_number_lines", "draw_outliers"]

COLORS = ("#717581", "#bd1f01", "#3f90da", "#832db6", "#ffa90e", "#a96b59")
STYLES = ("-", "-", "--", "-.", ":", "-")


def draw_number_lines(numbers: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Each positive number of a format as a tick on a logarithmic line, a format a row, E8M0 first.

    Args:
        numbers: by the format's name, its positive numbers in rising order.
        title: of the figure.
    """
    with course_style():
        figure = Figure(figsize=(10, 0.9 + 0.75 * (len(numbers) + 1)), layout="constrained")
        axes = figure.add_subplot()
        lines = {"E8M0, a scale": [2.0**power for power in range(-127, 128)], **numbers}
        for row, (name, values) in enumerate(lines.items()):
            _draw_line(axes, row, name, values)
        axes.set_xscale("log", base=2)
        axes.set_ylim(len(numbers) + 0.6, -0.7)
        axes.set_yticks([])
        axes.set_xlabel("size of the number; a tick for each")
        axes.set_xlim(2.0**-48, 2.0**32)
        axes.set_xticks([2.0**power for power in range(-32, 33, 8)])
        axes.set_title(title)
        axes.grid(False)
    return figure


def _draw_line(axes: Axes, row: int, name: str, values: Sequence[float]) -> None:
    inside = [value for value in values if 2.0**-31 < value < 2.0**17]
    axes.hlines(row, inside[0], inside[-1], color="#dddddd", lw=1)
    axes.plot(inside, [row] * len(inside), "|", ms=17, mew=0.9, color="black")
    axes.text(2.0**-47, row, name, va="center", fontsize=11)
    ends = f"{values[0]:.3g} to {values[-1]:.6g}"
    if len(inside) < len(values):
        ends = f"and on, $2^{{{math.log2(values[0]):.0f}}}$ to $2^{{{math.log2(values[-1]):.0f}}}$"
    axes.text(inside[-1] * 1.5, row, f" {ends}", va="center", fontsize=9)


def draw_outliers(
    factors: Sequence[float], errors: Mapping[str, Sequence[float]], *, title: str, device: str
) -> Figure:
    """The error of all other numbers over the size of one outlier, a scheme a line.

    Args:
        factors: how many times the others' size the outlier is.
        errors: by scheme, the relative error of the others, a factor each.
        title: of the figure.
        device: where it was computed.
    """
    with course_style():
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for (name, found), color, style in zip(errors.items(), COLORS, STYLES, strict=False):
            axes.loglog(
                factors, [100 * e for e in found], style, color=color, marker="o", ms=4, label=name
            )
        axes.set_xlabel("one number of 131,072 is so many times a typical one")
        axes.set_ylabel("error of all the others, %")
        axes.set_yticks([1, 10, 100], ["1", "10", "100"])
        axes.set_title(title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


check_public(globals())
