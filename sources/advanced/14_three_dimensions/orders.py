"""Bytes that leave nodes, for each order of the axes: one bar an order, one colour an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from utils.checked import check_public
from utils.units import GB, Evidence
from utils.views.style import course_style, print_evidence

SMALL = 0.05  # of the largest total: what is drawn once more
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

    Orders that send a small part of what the worst one sends stand once more, larger, on the right.

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
    totals = {name: sum(row.values()) for name, row in left.items()}
    small = {
        name: left[name] for name, total in totals.items() if total < SMALL * max(totals.values())
    }
    panels = [left, small] if 0 < len(small) < len(left) else [left]
    with course_style():
        figure = Figure(figsize=(10.5, 1.9 + 0.45 * len(left)), layout="constrained")
        places = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, rows, says in zip(
            places, panels, ("all orders", "the least, enlarged"), strict=False
        ):
            _draw_rows(axes, rows, axes_named)
            axes.set_title(says, fontsize=11, fontweight="normal")
        places[0].set_ylabel("fastest axis first")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        handles = [
            Patch(facecolor=AXIS_LOOKS[a][0], hatch=AXIS_LOOKS[a][1], label=a) for a in axes_named
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
        print_evidence(figure, [evidence])
    return figure


def _draw_rows(
    axes: Axes, left: Mapping[str, Mapping[str, float]], axes_named: Sequence[str]
) -> None:
    start = [0.0] * len(left)
    for axis in axes_named:
        sizes = [row.get(axis, 0.0) / GB for row in left.values()]
        color, hatch = AXIS_LOOKS[axis]
        axes.barh(range(len(left)), sizes, left=start, color=color, hatch=hatch, height=0.7)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    for row, (sizes_of, total) in enumerate(zip(left.values(), start, strict=True)):
        inside = total > 0.5 * max(start)
        axes.annotate(
            f"{total:,.0f} GB, {_parts(sizes_of)}",
            (0 if inside else total, row),
            xytext=(4, 0),
            va="center",
            textcoords="offset points",
            fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5},
        )
    axes.set_yticks(range(len(left)), list(left))
    axes.set_ylim(len(left) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * max(start) or 1)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("GB that leave nodes, all GPUs together")


def _parts(sizes: Mapping[str, float]) -> str:
    """What a total consists of: "all of it pp", "tp 120, shard 3"."""
    sent = {axis: size for axis, size in sizes.items() if size > 0}
    if len(sent) == 1:
        return f"all of it {next(iter(sent))}"
    ordered = sorted(sent.items(), key=lambda item: -item[1])
    return ", ".join(f"{axis} {size / GB:,.0f}" for axis, size in ordered) or "none"


__all__ = ["draw_orders"]

check_public(globals())
