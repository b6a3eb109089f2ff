"""Who holds what: the parts of parameters, gradients and optimizer state on each rank, drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.units import Category
from utils.views.style import LOOKS, course_style

STRIPS = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
MIXED_BYTES = (2, 2, 12)  # of each, per parameter, in mixed precision with Adam (ZeRO, section 3.1)
MOST_RANKS = 64  # more are boxes too thin to see
_EMPTY = "#f4f4f4"


def draw_holders(
    sharded: Mapping[str, Collection[str]],
    *,
    ranks: int = 4,
    sends: Mapping[str, str] | None = None,
    parameter_bytes: Sequence[int] = MIXED_BYTES,
    title: str = "",
) -> Figure:
    """A row for each scheme, a box for each rank; a strip's filled part is what the rank holds.

    A strip as wide as the box is a tensor of all parameters; its height is its bytes.

    Args:
        sharded: by scheme, the categories that are divided over the ranks; the others are whole.
        ranks: boxes in a row.
        sends: by scheme, what the ranks send each other in a step; stands beside the row.
        parameter_bytes: bytes of parameters, gradients and optimizer state, each per parameter.

    Raises:
        ValueError: no scheme, fewer than two ranks, a category that is none of the three, or not
            three heights above zero.
    """
    unknown = {name for names in sharded.values() for name in names} - {*map(str, STRIPS)}
    if not sharded or not 2 <= ranks <= MOST_RANKS or unknown:
        raise ValueError(
            f"draw_holders() takes one scheme or more on 2 to {MOST_RANKS} ranks, each with some of "
            f"{', '.join(map(str, STRIPS))}; got {[*sharded]} on {ranks} ranks"
            f"{f', with {sorted(unknown)}' if unknown else ''}."
        )
    if len(parameter_bytes) != len(STRIPS) or min(parameter_bytes) <= 0:
        raise ValueError(
            "parameter_bytes holds the bytes of parameters, gradients and optimizer state, each "
            f"above zero: {MIXED_BYTES}, say; got {tuple(parameter_bytes)}."
        )
    with course_style():
        figure = Figure(figsize=(11, 0.7 + 1.15 * len(sharded)), layout="constrained")
        axes = figure.add_subplot()
        for row, (name, names) in enumerate(sharded.items()):
            for rank in range(ranks):
                _draw_box(axes, rank, row, ranks, names, parameter_bytes)
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


def _draw_box(
    axes: Axes,
    rank: int,
    row: int,
    ranks: int,
    sharded: Collection[str],
    parameter_bytes: Sequence[int],
) -> None:
    left, top, scale = 1.15 * rank, row, 0.8 / sum(parameter_bytes)
    for category, bytes_each in zip(STRIPS, parameter_bytes, strict=True):
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
