"""For each order of the axes: bytes that leave nodes, and seconds of the port that sends most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from utils.checked import check_public
from utils.units import GB, Evidence
from utils.views.style import course_style, print_evidence

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
    seconds: Mapping[str, float],
    *,
    evidence: Sequence[Evidence] = (Evidence.SIMULATED, Evidence.PREDICTED),
    title: str = "",
) -> Figure:
    """Draw what leaves nodes in a step, by the order of axes and by axis; beside it the time it takes.

    Args:
        left: by the name of an order, bytes by axis, all ranks together.
        seconds: by the same names, what the port that sends most needs for its share.
        evidence: of the bytes and of the seconds.
        title: of the figure.

    Raises:
        ValueError: nothing to draw, other orders in `seconds`, or an axis that has no colour.
    """
    axes_named = list(dict.fromkeys(axis for row in left.values() for axis in row))
    if not left or left.keys() != seconds.keys() or set(axes_named) - AXIS_LOOKS.keys():
        raise ValueError(
            f"draw_orders() takes one order or more, with bytes by {', '.join(AXIS_LOOKS)}, and "
            f"seconds for each; got {[*left]} with {axes_named}, and {[*seconds]}."
        )
    with course_style():
        figure = Figure(figsize=(10.5, 2.0 + 0.42 * len(left)), layout="constrained")
        axes = figure.add_subplot()
        _draw_rows(axes, left, seconds, axes_named)
        axes.set_ylabel("fastest axis first")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        handles = [
            Patch(facecolor=AXIS_LOOKS[a][0], hatch=AXIS_LOOKS[a][1], label=a) for a in axes_named
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
        print_evidence(figure, list(evidence))
    return figure


def _draw_rows(
    axes: Axes,
    left: Mapping[str, Mapping[str, float]],
    seconds: Mapping[str, float],
    axes_named: Sequence[str],
) -> None:
    start = [0.0] * len(left)
    for axis in axes_named:
        sizes = [row.get(axis, 0.0) / GB for row in left.values()]
        color, hatch = AXIS_LOOKS[axis]
        axes.barh(range(len(left)), sizes, left=start, color=color, hatch=hatch, height=0.7)
        start = [a + b for a, b in zip(start, sizes, strict=True)]
    for row, (name, total) in enumerate(zip(left, start, strict=True)):
        inside = total > 0.5 * max(start)
        took = f"{seconds[name]:,.2f} s" if seconds[name] < 10 else f"{seconds[name]:,.0f} s"
        text = f"{total:,.0f} GB, {_parts(left[name])}; {took}"
        _label(axes, 0 if inside else total, row, text)
    axes.set_yticks(range(len(left)), list(left))
    axes.set_ylim(len(left) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * max(start) or 1)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("GB that leave nodes, all GPUs together")


def _label(axes: Axes, x: float, row: int, text: str) -> None:
    axes.annotate(
        text,
        (x, row),
        xytext=(4, 0),
        va="center",
        textcoords="offset points",
        fontsize=10,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5},
    )


def _parts(sizes: Mapping[str, float]) -> str:
    """What a total consists of: "all of it pp", "tp 120, shard 3"."""
    sent = {axis: size for axis, size in sizes.items() if size > 0}
    if len(sent) == 1:
        return f"all of it {next(iter(sent))}"
    ordered = sorted(sent.items(), key=lambda item: -item[1])
    return ", ".join(f"{axis} {size / GB:,.0f}" for axis, size in ordered) or "none"


__all__ = ["draw_orders"]

check_public(globals())
