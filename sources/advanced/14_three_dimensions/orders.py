"""Bytes that leave nodes, for each order of the axes: one bar an order, one colour an axis."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import GB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

# petroff10 (Petroff 2021, arXiv:2107.02270); in grey the hatch tells them apart.
AXIS_LOOKS = {
    "tp": ("#3f90da", ""),
    "pp": ("#ffa90e", "//"),
    "shard": ("#bd1f01", "\\\\"),
    "replicate": ("#832db6", "xx"),
    "cp": ("#717581", ".."),
}


def draw_orders(
    left: Mapping[str, Mapping[str, float]],
    *,
    evidence: Evidence = Evidence.SIMULATED,
    title: str = "",
) -> Figure:
    """Draw what leaves nodes in a step, by the order of axes and by axis.

    Args:
        left: by the name of an order, bytes by axis.
        evidence: of the bytes.
        title: of the figure.

    Raises:
        ValueError: nothing to draw, or an axis that has no colour.
    """
    axes_named = list(dict.fromkeys(axis for row in left.values() for axis in row))
    if not left or set(axes_named) - AXIS_LOOKS.keys():
        raise ValueError(
            f"draw_orders() takes one order or more, with bytes by {', '.join(AXIS_LOOKS)}; got "
            f"{[*left]} with {axes_named}."
        )
    with course_style():
        figure, axes = empty_figure(10.5, 1.6 + 0.5 * len(left))
        start = [0.0] * len(left)
        for axis in axes_named:
            sizes = [row.get(axis, 0.0) / GB for row in left.values()]
            color, hatch = AXIS_LOOKS[axis]
            axes.barh(range(len(left)), sizes, left=start, color=color, hatch=hatch, height=0.7)
            start = [a + b for a, b in zip(start, sizes, strict=True)]
        for row, (sizes_of, total) in enumerate(zip(left.values(), start, strict=True)):
            most = max(sizes_of, key=lambda axis: sizes_of[axis])
            axes.annotate(
                f"{total:,.0f}, most of it {most}",
                (total, row),
                xytext=(4, 0),
                va="center",
                textcoords="offset points",
                fontsize=11,
            )
        axes.set_yticks(range(len(left)), list(left))
        axes.set_ylim(len(left) - 0.5, -0.5)
        axes.set_xlim(0, 1.3 * max(start) or 1)
        axes.grid(False, axis="y")
        axes.set_xlabel("GB that leave nodes in a step, all GPUs together")
        axes.set_ylabel("fastest axis first")
        axes.set_title(title)
        handles = [
            Patch(facecolor=AXIS_LOOKS[a][0], hatch=AXIS_LOOKS[a][1], label=a) for a in axes_named
        ]
        figure.legend(handles=handles, loc="outside right upper")
        print_evidence(figure, [evidence])
    return figure


__all__ = ["draw_orders"]

check_public(globals())
