"""Figures of the out-of-memory clinic: four full cards, patients against budgets, one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.clinic import Examination
from utils.units import GIB, MIB, Evidence, format_bytes
from utils.views.style import course_style, empty_figure, print_evidence, wrapped

from .looks import EDGE, FREE, OUTSIDE, SICK, WELL, draw_limit
from .over_time import alive_in
from .segments import Segment, draw_asked, draw_segment, legend_of, note_small, reserved_bytes


class PatientBytes(NamedTuple):
    """A patient's bytes before and after its cure (None: not cured yet), and its budget."""

    before_bytes: int
    limit_bytes: int
    after_bytes: int | None = None


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
                axes, row - (thick / 2 if cured else 0), case.before_bytes, case, SICK, "//", thick
            )
            if case.after_bytes is not None:
                _bar(axes, row + thick / 2, case.after_bytes, case, WELL, "", thick)
        axes.axvline(1, color="black", linewidth=1.5)
        axes.set_yticks(range(len(cases)), [wrapped(name) for name in cases])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlim(
            0, 1.45 * max(case.before_bytes / case.limit_bytes for case in cases.values())
        )
        axes.set_xlabel("bytes, divided by the budget")
        axes.set_title(title)
        looks = [("before", SICK, "//")] + ([("after the cure", WELL, "")] if cured else [])
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
    rows: Mapping[str, Sequence[Segment]],
    *,
    title: str,
    asked: Mapping[str, int] | None = None,
    names: Mapping[str, str] | None = None,
) -> Figure:
    """What a GPU's allocator has reserved: one bar a segment, blocks in use filled, free ones white.

    Args:
        rows: the segments of each panel.
        title: of the figure.
        asked: bytes of a request that failed, by panel; a dashed bar below the segments.
        names: what the legend says in place of a category.

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
                draw_segment(axes, number, segment)
                note_small(axes, number, segment)
            if name in asked:
                draw_asked(axes, len(segments), asked[name])
            axes.set_xlim(0, 1.05 * most / MIB)
            axes.set_title(
                f"{name}\n{format_bytes(reserved_bytes(segments))} reserved", fontsize=12
            )
            axes.set_xlabel("size of the segment (MiB)")
            axes.grid(False, axis="y")
        panels[0].set_ylim(count - 0.3, -0.7)
        panels[0].set_ylabel("segments")
        panels[0].set_yticks([])
        figure.legend(handles=legend_of(rows, names or {}), loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.SIMULATED])
    return figure


def draw_peak(blocks: Mapping[str, int], limit_bytes: int, *, title: str) -> Figure:
    """What is alive at one moment, as one bar in parts, against a budget.

    Raises:
        ValueError: no block.
    """
    if not blocks:
        raise ValueError("draw_peak() needs a block or more.")
    with course_style():
        figure, axes = empty_figure(height=2.6)
        left = 0.0
        for name, size in blocks.items():
            axes.barh(0, size / MIB, left=left, height=0.7, color="#92dadd", edgecolor="white")
            text = f"{wrapped(name)}\n{size / MIB:.1f} MiB"
            axes.text(left + size / MIB / 2, 0, text, ha="center", va="center", fontsize=9)
            left += size / MIB
        draw_limit(axes, limit_bytes, upright=True)
        axes.set_yticks([])
        axes.set_ylim(-0.6, 0.75)
        axes.set_xlim(0, 1.02 * left)
        axes.set_xlabel("memory (MiB)")
        axes.grid(False, axis="y")
        axes.set_title(title)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


class FullCard(NamedTuple):
    """Parts of a card in bytes, as an error told them; whose error it was; which are not PyTorch's."""

    parts: Mapping[str, int]
    source: str
    not_pytorch: Sequence[str]


class Pieces(NamedTuple):
    """Segments at a request that failed, its bytes, the GPU's, and what the legend calls categories."""

    segments: Sequence[Segment]
    asked_bytes: int
    limit_bytes: int
    names: Mapping[str, str]


def draw_four_ways(
    pieces: Pieces,
    card: FullCard,
    kept: Examination,
    moment: Examination,
) -> Figure:
    """The four ways to fill a card: in pieces, not PyTorch's, kept, and one large moment."""
    with course_style():
        figure = Figure(figsize=(9.0, 7.0), layout="constrained")
        split, outside, stairs, tooth = figure.subplots(2, 2).flat
        _pieces(split, pieces)
        _card(outside, card)
        alive_in(stairs, kept)
        alive_in(tooth, moment)
        stairs.set_ylabel("alive (MiB)")
        titles = (
            "a. In pieces: none is large enough\n(a patient, simulated)",
            f"b. Not this process's PyTorch: hatched\n({card.source}, published)",
            "c. Kept from step to step\n(a patient, measured)",
            "d. One moment is too large\n(a patient, measured)",
        )
        for axes, title in zip(figure.axes, titles, strict=True):
            axes.set_title(title, fontsize=11)
        figure.suptitle(
            "Four ways to fill a card", x=0.01, ha="left", fontsize=13, fontweight="bold"
        )
        print_evidence(figure, [Evidence.MEASURED, Evidence.SIMULATED, Evidence.PUBLISHED])
    return figure


def _pieces(axes, pieces: Pieces) -> None:
    """Each segment with its blocks, what was asked for, and what lies outside of all segments."""
    segments, reserved = pieces.segments, reserved_bytes(pieces.segments)
    for number, segment in enumerate(segments):
        draw_segment(axes, number, segment)
    draw_asked(axes, len(segments), pieces.asked_bytes)
    axes.set_ylim(len(segments) + 0.7, -0.7)
    axes.set_yticks([])
    axes.set_xlim(0, 2.9 * pieces.asked_bytes / MIB)
    axes.set_xlabel("size of a segment (MiB)")
    axes.grid(False)
    outside = pieces.limit_bytes - reserved
    axes.text(
        0.38,
        0.17,
        f"{reserved / MIB:.0f} MiB reserved of {pieces.limit_bytes / MIB:.0f};\n"
        f"{outside / MIB:.0f} MiB outside of segments:\ntoo few for one of {pieces.asked_bytes / MIB:.0f}",
        transform=axes.transAxes,
        va="bottom",
        fontsize=8,
    )
    handles = legend_of({"": segments}, pieces.names)
    axes.legend(handles=handles, loc="upper right", fontsize=8, borderaxespad=0.2)


def _card(axes, card: FullCard) -> None:
    """A bar for each part of a card, each where the one before ends."""
    left = 0.0
    for row, (name, size) in enumerate(card.parts.items()):
        is_free = name == "free"
        color = FREE if is_free else OUTSIDE if name in card.not_pytorch else WELL
        hatch = "//" if color == OUTSIDE else ""
        axes.barh(
            row,
            size / GIB,
            left=left,
            height=0.7,
            color=color,
            hatch=hatch,
            edgecolor=EDGE if is_free else "white",
        )
        right = left + size / GIB
        text, align, at = f"{size / GIB:.2f}", "left", right
        if right > 0.85 * sum(card.parts.values()) / GIB:
            align, at = "right", left
        axes.annotate(
            f" {text} ",
            (at, row),
            ha=align,
            va="center",
            fontsize=9,
        )
        left = right
    axes.set_yticks(range(len(card.parts)), [wrapped(name) for name in card.parts])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * left)
    axes.set_xlabel("of the card (GiB)")
    axes.grid(False, axis="y")


__all__ = [
    "FullCard",
    "PatientBytes",
    "Pieces",
    "draw_four_ways",
    "draw_peak",
    "draw_segments",
    "draw_ward",
]

check_public(globals())
