"""Seconds of a message against its size: what was measured, and the alpha-beta line through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from utils.checked import check_public
from utils.traffic.cost import AlphaBeta
from utils.units import Evidence, format_bytes
from utils.views.style import course_style, empty_figure, print_evidence

_LOOKS = [
    ("#1170aa", "o", "-"),
    ("#c85200", "s", "--"),
    ("#717581", "^", "-."),
    ("black", "D", ":"),
]
Points = Sequence[tuple[float, float]]  # bytes, seconds


def draw_link_costs(
    points: Mapping[str, Points],
    lines: Mapping[str, AlphaBeta],
    *,
    title: str,
    device: str = "this machine",
) -> Figure:
    """Time over size, both logarithmic. A dotted line stands where start and bytes cost the same.

    Args:
        points: measured (bytes, seconds) by name; may be empty.
        lines: costs by name, drawn over the range of all points, or from 1 KiB to 1 GiB.
        title: of the figure.
        device: where the points were measured.

    Raises:
        ValueError: there is nothing to draw, or more names than looks.
    """
    names = list(dict.fromkeys([*points, *lines]))
    if not 1 <= len(names) <= len(_LOOKS):
        raise ValueError(
            f"draw_link_costs() draws 1 to {len(_LOOKS)} names; these are {len(names)}."
        )
    sizes = [size for row in points.values() for size, _ in row] or [2**10, 2**30]
    span = np.geomspace(min(sizes), max(sizes), 200)
    how = "fitted" if points else "predicted"
    with course_style():
        figure, axes = empty_figure(height=4.2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for name, (color, marker, dash) in zip(names, _LOOKS, strict=False):
            if name in points:
                axes.plot(*zip(*points[name], strict=True), marker, color=color, ms=6, label=name)
            if name in lines:
                label = f"{name}, {how}: {_words(lines[name])}"
                axes.plot(
                    span,
                    [lines[name].seconds(n) for n in span],
                    dash,
                    color=color,
                    lw=1.8,
                    label=label,
                )
                _mark_even(axes, lines[name], color, span)
        ticks = [2**power for power in range(8, 36, 4) if span[0] <= 2**power <= span[-1]]
        axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
        axes.set_xlabel("size of the message")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{1e3 * y:g}"))
        axes.set_ylabel("time (ms)")
        axes.set_title(title)
        axes.margins(y=0.12)
        axes.legend(fontsize=9, loc="best")
        if points:  # a line through its own points foretells nothing
            print_evidence(figure, [Evidence.MEASURED], [f"{device}; line fitted to these points"])
        else:
            print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _words(cost: AlphaBeta) -> str:
    return f"{1e6 * cost.alpha_seconds:,.0f} µs + bytes / {cost.bytes_per_second / 1e9:,.3g} GB/s"


def _mark_even(axes: Axes, cost: AlphaBeta, color: str, span: np.ndarray) -> None:
    """Left of it latency is most of the time, right of it bandwidth."""
    if span[0] < cost.even_bytes < span[-1]:
        axes.axvline(cost.even_bytes, color=color, ls=":", lw=1)
        axes.text(
            cost.even_bytes,
            0.03,
            " bandwidth-bound",
            transform=axes.get_xaxis_transform(),
            fontsize=9,
            color=color,
            ha="left",
            va="bottom",
        )
        axes.text(
            cost.even_bytes,
            0.03,
            "latency-bound ",
            transform=axes.get_xaxis_transform(),
            fontsize=9,
            color=color,
            ha="right",
            va="bottom",
        )


__all__ = ["draw_link_costs"]

check_public(globals())
