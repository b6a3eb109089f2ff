"""Figures of the out-of-memory clinic: patients against their budgets, and a GPU's segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import MIB, Category, Evidence, format_bytes
from utils.views.style import LOOKS, course_style, empty_figure, print_evidence, wrapped

_SICK, _WELL, _FREE = "#bd1f01", "#3f90da", "#ffffff"


class PatientBytes(NamedTuple):
    """A patient's bytes before and after its cure (None: not cured yet), and its budget."""

    before_bytes: int
    limit_bytes: int
    after_bytes: int | None = None


class Segment(NamedTuple):
    """A segment of the caching allocator: its blocks as (bytes, category; "" if free), in order."""

    blocks: tuple[tuple[int, str], ...]


def draw_ward(
    cases: Mapping[str, PatientBytes],
    *,
    title: str,
    evidence: Sequence[Evidence] = (Evidence.MEASURED,),
) -> Figure:
    """Each patient's bytes as a share of its budget, before and, where there is one, after the cure.

    Raises:
        ValueError: there is nobody to draw.
    """
    if not cases:
        raise ValueError("draw_ward() needs a patient or more; the ward is empty.")
    cured = any(case.after_bytes is not None for case in cases.values())
    thick = 0.38 if cured else 0.6
    with course_style():
        figure, axes = empty_figure(height=1.4 + 0.52 * len(cases))
        for row, case in enumerate(cases.values()):
            _bar(
                axes, row - (thick / 2 if cured else 0), case.before_bytes, case, _SICK, "//", thick
            )
            if case.after_bytes is not None:
                _bar(axes, row + thick / 2, case.after_bytes, case, _WELL, "", thick)
        axes.axvline(1, color="black", linewidth=1.5)
        axes.set_yticks(range(len(cases)), [wrapped(name) for name in cases])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlim(
            0, 1.45 * max(case.before_bytes / case.limit_bytes for case in cases.values())
        )
        axes.set_xlabel("bytes, divided by the budget")
        axes.set_title(title)
        looks = [("before", _SICK, "//")] + ([("after the cure", _WELL, "")] if cured else [])
        handles = [Patch(facecolor=c, hatch=h, edgecolor="white", label=n) for n, c, h in looks]
        axes.legend(handles=handles, loc="lower right")
        print_evidence(figure, evidence)
    return figure


def _bar(
    axes, row: float, size: int, case: PatientBytes, color: str, hatch: str, thick: float
) -> None:
    share = size / case.limit_bytes
    axes.barh(row, share, height=thick, color=color, hatch=hatch, edgecolor="white", linewidth=0)
    note = f"{format_bytes(size)} of {format_bytes(case.limit_bytes)}"
    axes.annotate(
        note,
        (max(share, 1), row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


def draw_segments(
    rows: Mapping[str, Sequence[Segment]], *, title: str, asked: Mapping[str, int] | None = None
) -> Figure:
    """What a GPU's allocator has reserved: one bar a segment, blocks in use filled, free ones white.

    Args:
        rows: the segments of each panel.
        asked: bytes of a request that failed, by panel; a dashed bar below the segments.

    Raises:
        ValueError: no segments.
    """
    if not any(rows.values()):
        raise ValueError("draw_segments() needs segments; nothing is reserved.")
    asked = asked or {}
    most = max(sum(size for size, _ in s.blocks) for row in rows.values() for s in row)
    with course_style():
        count = max(len(row) for row in rows.values()) + bool(asked)
        figure = Figure(figsize=(9.0, 2.0 + 0.22 * count), layout="constrained")
        panels = figure.subplots(1, len(rows), squeeze=False, sharey=True)[0]
        for axes, (name, segments) in zip(panels, rows.items(), strict=True):
            for number, segment in enumerate(segments):
                _segment(axes, number, segment)
            if name in asked:
                _asked(axes, len(segments), asked[name])
            axes.set_xlim(0, 1.05 * most / MIB)
            axes.set_title(name, fontsize=12)
            axes.set_xlabel("size of the segment (MiB)")
            axes.grid(False, axis="y")
        panels[0].set_ylim(count - 0.3, -0.7)
        panels[0].set_ylabel("segments")
        panels[0].set_yticks([])
        figure.legend(handles=_legend(rows), loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.SIMULATED])
    return figure


def _legend(rows: Mapping[str, Sequence[Segment]]) -> list[Patch]:
    taken = {name for row in rows.values() for s in row for size, name in s.blocks if size > MIB}
    looks = [(name, LOOKS[Category(name)]) for name in sorted(taken - {""})]
    return [
        *(Patch(facecolor=k.color, hatch=k.hatch, edgecolor="white", label=n) for n, k in looks),
        Patch(facecolor=_FREE, edgecolor="#717581", label="reserved, free"),
    ]


def _asked(axes, number: int, size: int) -> None:
    axes.barh(
        number, size / MIB, height=0.7, color=_FREE, edgecolor=_SICK, linewidth=1.5, linestyle="--"
    )
    axes.annotate(
        f"asked for: {format_bytes(size)}",
        (size / MIB, number),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


def _segment(axes, number: int, segment: Segment) -> None:
    left = 0.0
    for size, name in segment.blocks:
        look = LOOKS[Category(name)] if name else None
        axes.barh(
            number,
            size / MIB,
            left=left / MIB,
            height=0.7,
            color=look.color if look else _FREE,
            hatch=look.hatch if look else "",
            edgecolor="white" if look else "#717581",
            linewidth=0.5,
        )
        left += size
    axes.barh(number, left / MIB, height=0.7, fill=False, edgecolor="#717581", linewidth=0.5)


def draw_blocks(blocks: Mapping[str, int], *, title: str) -> Figure:
    """Blocks alive at one moment, a bar each with its bytes.

    Raises:
        ValueError: no block.
    """
    if not blocks:
        raise ValueError("draw_blocks() needs a block or more.")
    with course_style():
        figure, axes = empty_figure(height=1.2 + 0.4 * len(blocks))
        for row, size in enumerate(blocks.values()):
            axes.barh(row, size / MIB, height=0.7, color=_WELL)
            axes.annotate(
                format_bytes(size),
                (size / MIB, row),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(blocks)), list(blocks))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(blocks.values()) / MIB)
        axes.set_xlabel("memory (MiB)")
        axes.grid(False, axis="y")
        axes.set_title(title)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


__all__ = ["PatientBytes", "Segment", "draw_blocks", "draw_segments", "draw_ward"]

check_public(globals())
