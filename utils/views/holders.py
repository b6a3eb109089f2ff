"""Who holds what: the parts of parameters, gradients and optimizer state on each rank, drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.units import Category
from utils.views.style import LOOKS, course_style

# Bytes per parameter in mixed precision (ZeRO, section 3.1): the heights of the strips.
STRIPS = {Category.PARAMETERS: 2, Category.GRADIENTS: 2, Category.OPTIMIZER_STATE: 12}
_EMPTY = "#f4f4f4"


def draw_holders(
    sharded: Mapping[str, Collection[str]],
    *,
    ranks: int = 4,
    sends: Mapping[str, str] | None = None,
    title: str = "",
) -> Figure:
    """A row for each scheme, a box for each rank; a strip's filled part is what the rank holds.

    A strip as wide as the box is a tensor of all parameters; its height is its bytes in mixed
    precision, 2 (parameters), 2 (gradients) and 12 (optimizer state).

    Args:
        sharded: by scheme, the categories that are divided over the ranks; the others are whole.
        ranks: boxes in a row.
        sends: by scheme, what the ranks send each other in a step; stands beside the row.

    Raises:
        ValueError: no scheme, fewer than two ranks, or a category that is none of the three.
    """
    unknown = {name for names in sharded.values() for name in names} - {*map(str, STRIPS)}
    if not sharded or ranks < 2 or unknown:
        raise ValueError(
            "draw_holders() takes one scheme or more on two ranks or more, each with some of "
            f"{', '.join(map(str, STRIPS))}; got {[*sharded]} on {ranks} ranks"
            f"{f', with {sorted(unknown)}' if unknown else ''}."
        )
    with course_style():
        figure = Figure(figsize=(11, 0.7 + 1.15 * len(sharded)), layout="constrained")
        axes = figure.add_subplot()
        for row, (name, names) in enumerate(sharded.items()):
            for rank in range(ranks):
                _draw_box(axes, rank, row, ranks, names)
            axes.text(-0.12, row + 0.4, name, ha="right", va="center", fontsize=12)
            axes.text(
                1.15 * ranks, row + 0.4, (sends or {}).get(name, ""), va="center", fontsize=10
            )
        axes.set(xlim=(-0.9, 1.15 * ranks + 2.6), ylim=(len(sharded), -0.25))
        for rank in range(ranks):
            axes.text(1.15 * rank + 0.5, -0.12, f"rank {rank}", ha="center", fontsize=11)
        axes.axis("off")
        axes.set_title(title)
        handles = [
            Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, label=str(c)) for c in STRIPS
        ]
        if any(sharded.values()):
            handles.append(
                Patch(facecolor=_EMPTY, edgecolor="#bbbbbb", label="held by other ranks")
            )
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=10)
    return figure


def _draw_box(axes: Axes, rank: int, row: int, ranks: int, sharded: Collection[str]) -> None:
    left, top, scale = 1.15 * rank, row, 0.8 / sum(STRIPS.values())
    for category, bytes_each in STRIPS.items():
        height = scale * bytes_each
        axes.add_patch(_part(left, top, 1, height, _EMPTY, ""))
        start, width = (rank / ranks, 1 / ranks) if str(category) in sharded else (0, 1)
        look = LOOKS[category]
        axes.add_patch(_part(left + start, top, width, height, look.color, look.hatch))
        top += height


def _part(
    left: float, top: float, width: float, height: float, color: str, hatch: str
) -> Rectangle:
    return Rectangle(
        (left, top), width, height, facecolor=color, hatch=hatch, edgecolor="#bbbbbb", lw=0.6
    )
