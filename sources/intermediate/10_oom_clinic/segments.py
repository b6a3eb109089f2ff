"""Figures of a GPU's segments: the blocks in each, what is free, and what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from utils.units import MIB, Category, format_bytes
from utils.views.style import LOOKS

from .looks import EDGE, FREE, SICK

SMALL_SEGMENT_BYTES = 2 * MIB


class Segment(NamedTuple):
    """A segment of the caching allocator: its blocks as (bytes, category; "" if free), in order."""

    blocks: tuple[tuple[int, str], ...]


def reserved_bytes(segments: Sequence[Segment]) -> int:
    return sum(size for segment in segments for size, _ in segment.blocks)


def legend_of(rows: Mapping[str, Sequence[Segment]], names: Mapping[str, str]) -> list[Patch]:
    taken = {name for row in rows.values() for s in row for size, name in s.blocks if size > MIB}
    looks = [(names.get(name, name), LOOKS[Category(name)]) for name in sorted(taken - {""})]
    return [
        *(Patch(facecolor=k.color, hatch=k.hatch, edgecolor="white", label=n) for n, k in looks),
        Patch(facecolor=FREE, edgecolor=EDGE, label="reserved, free"),
    ]


def draw_asked(axes: Axes, number: int, size: int) -> None:
    axes.barh(
        number, size / MIB, height=0.7, color=FREE, edgecolor=SICK, linewidth=1.5, linestyle="--"
    )
    axes.annotate(
        f"asked for: {format_bytes(size)}",
        (size / MIB, number),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


def draw_segment(axes: Axes, number: int, segment: Segment) -> None:
    left = 0.0
    for size, name in segment.blocks:
        look = LOOKS[Category(name)] if name else None
        axes.barh(
            number,
            size / MIB,
            left=left / MIB,
            height=0.7,
            color=look.color if look else FREE,
            hatch=look.hatch if look else "",
            edgecolor="white" if look else EDGE,
            linewidth=0.5,
        )
        left += size
    axes.barh(number, left / MIB, height=0.7, fill=False, edgecolor=EDGE, linewidth=0.5)


def note_small(axes: Axes, number: int, segment: Segment) -> None:
    """A segment of the small pool looks free: what is in it is thinner than a line."""
    size = sum(size for size, _ in segment.blocks)
    if size != SMALL_SEGMENT_BYTES:
        return
    taken = sum(part for part, name in segment.blocks if name)
    note = f"small tensors; {format_bytes(taken)} taken"
    axes.annotate(
        note,
        (size / MIB, number),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


__all__ = ["Segment", "draw_asked", "draw_segment", "legend_of", "note_small", "reserved_bytes"]
