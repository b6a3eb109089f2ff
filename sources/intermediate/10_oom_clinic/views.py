"""Figures of the out-of-memory clinic: four full cards, patients against budgets, a GPU's segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.clinic import Examination
from utils.units import GIB, MIB, Category, Evidence, format_bytes
from utils.views.style import LOOKS, course_style, empty_figure, print_evidence, wrapped

from .steps import Step, step_ends

_SICK, _WELL, _FREE, _EDGE = "#bd1f01", "#3f90da", "#ffffff", "#717581"
_SMALL_SEGMENT_BYTES = 2 * MIB


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
                _note_small(axes, number, segment)
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
        Patch(facecolor=_FREE, edgecolor=_EDGE, label="reserved, free"),
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
            edgecolor="white" if look else _EDGE,
            linewidth=0.5,
        )
        left += size
    axes.barh(number, left / MIB, height=0.7, fill=False, edgecolor=_EDGE, linewidth=0.5)


def _note_small(axes, number: int, segment: Segment) -> None:
    """A segment of the small pool looks free: what is in it is thinner than a line."""
    size = sum(size for size, _ in segment.blocks)
    if size != _SMALL_SEGMENT_BYTES:
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
        for number, (name, size) in enumerate(blocks.items()):
            shade = ("#3f90da", "#92dadd")[number % 2]
            plain = {"facecolor": shade, "edgecolor": "none", "pad": 1}  # over the budget's line
            axes.barh(0, size / MIB, left=left, height=0.7, color=shade, edgecolor="white")
            text = f"{wrapped(name)}\n{size / MIB:.1f} MiB"
            axes.text(
                left + size / MIB / 2, 0, text, ha="center", va="center", fontsize=9, bbox=plain
            )
            left += size / MIB
        _limit(axes, limit_bytes, upright=True)
        axes.set_yticks([])
        axes.set_ylim(-0.6, 0.75)
        axes.set_xlim(0, 1.02 * left)
        axes.set_xlabel("memory (MiB)")
        axes.grid(False, axis="y")
        axes.set_title(title)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _limit(axes, limit_bytes: int, *, upright: bool = False, named: bool = True) -> None:
    """The budget, as a dashed line with its name."""
    at = limit_bytes / MIB
    line = axes.axvline if upright else axes.axhline
    line(at, color="black", linewidth=1.5, linestyle="--")
    if not named:
        return
    axes.annotate(
        f" budget {format_bytes(limit_bytes)}",
        (at, 0.98) if upright else (0.01, at),
        xycoords=axes.get_xaxis_transform() if upright else axes.get_yaxis_transform(),
        xytext=(0, 0 if upright else 3),
        textcoords="offset points",
        va="top" if upright else "bottom",
        fontsize=9,
    )


def draw_alive(runs: Mapping[str, Examination], *, title: str, after_last: str = "") -> Figure:
    """What is alive through whole runs, a panel each: lines end the steps, a dashed one is the budget.

    Args:
        runs: by the title of their panel.
        after_last: what comes after the last step, written there.

    Raises:
        ValueError: no run.
    """
    if not runs:
        raise ValueError("draw_alive() needs a run or more.")
    with course_style():
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, (name, found) in zip(panels, runs.items(), strict=True):
            _alive(axes, found, after_last)
            axes.set_title(name, fontsize=12)
        panels[0].set_ylabel("alive (MiB)")
        panels[0].set_ylim(0, 1.1 * max(f.run.peak_bytes for f in runs.values()) / MIB)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _alive(axes, found: Examination, after_last: str = "") -> None:
    """All bytes alive after each allocator event, with the ends of steps."""
    timeline = found.run.timeline
    curve = timeline.alive_bytes / MIB
    axes.fill_between(range(len(curve)), 0, curve, step="post", color=_WELL, linewidth=0)
    ends = np.searchsorted(timeline.times_ns, step_ends(found), side="right")
    for end in ends:
        axes.axvline(end, color=_EDGE, linewidth=0.6)
    starts = np.concatenate([[0], ends[:-1]])
    peaks = [
        first + int(curve[first:end].argmax()) for first, end in zip(starts, ends, strict=True)
    ]
    axes.plot(peaks, curve[peaks], "v", color="black", markersize=4, zorder=3)
    middles = (starts + ends) / 2
    places, names = list(middles), [str(number) for number in range(1, len(ends) + 1)]
    if after_last:
        places, names = [*places, (ends[-1] + len(curve)) / 2], [*names, after_last]
    axes.set_xticks(places, names)
    axes.set_xlim(0, len(curve))
    axes.set_ylim(0, 1.1 * max(curve.max(), found.patient.limit_bytes / MIB))
    axes.set_xlabel("step (width: allocator events)")
    axes.grid(False, axis="x")
    _limit(axes, found.patient.limit_bytes)


class FullCard(NamedTuple):
    """Parts of a card in bytes, as an error told them; whose error it was; which are not PyTorch's."""

    parts: Mapping[str, int]
    source: str
    not_pytorch: Sequence[str]


def draw_four_ways(
    segments: Sequence[Segment],
    asked_bytes: int,
    card: FullCard,
    kept: Examination,
    moment: Examination,
) -> Figure:
    """The four ways to fill a card: in pieces, not PyTorch's, kept, and one large moment."""
    with course_style():
        figure = Figure(figsize=(9.0, 6.2), layout="constrained")
        pieces, outside, stairs, tooth = figure.subplots(2, 2).flat
        for number, segment in enumerate(segments):
            _segment(pieces, number, segment)
        _asked(pieces, len(segments), asked_bytes)
        pieces.set_ylim(len(segments) + 0.7, -0.7)
        pieces.set_yticks([])
        pieces.set_xlim(0, 2 * asked_bytes / MIB)
        pieces.set_xlabel("size of a segment (MiB); white is free")
        _card(outside, card)
        _alive(stairs, kept)
        _alive(tooth, moment)
        stairs.set_ylabel("alive (MiB)")
        titles = (
            "a. In pieces: none is large enough\n(fragmentation, simulated)",
            f"b. Not PyTorch's: hatched\n({card.source}, published)",
            f"c. Kept from step to step\n({kept.patient.name}, measured)",
            f"d. One moment is too large\n({moment.patient.name}, measured)",
        )
        for axes, title in zip(figure.axes, titles, strict=True):
            axes.set_title(title, fontsize=11)
        figure.suptitle(
            "Four ways to fill a card", x=0.01, ha="left", fontsize=13, fontweight="bold"
        )
        print_evidence(figure, [Evidence.MEASURED, Evidence.SIMULATED, Evidence.PUBLISHED])
    return figure


def _card(axes, card: FullCard) -> None:
    """A bar for each part of a card, each where the one before ends."""
    left = 0.0
    for row, (name, size) in enumerate(card.parts.items()):
        is_free = name == "free"
        color = _FREE if is_free else _SICK if name in card.not_pytorch else _WELL
        hatch = "//" if color == _SICK else ""
        axes.barh(
            row,
            size / GIB,
            left=left,
            height=0.7,
            color=color,
            hatch=hatch,
            edgecolor=_EDGE if is_free else "white",
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


def draw_steps(
    runs: Mapping[str, Sequence[Step]],
    names: Mapping[str, Sequence[str]],
    *,
    limit_bytes: int,
    title: str,
) -> Figure:
    """Each step's peak as a bar, and what is reserved after it as a line; a panel a run.

    Args:
        runs: steps by the title of their panel.
        names: of each run's steps.
        limit_bytes: the budget, a dashed line.
        title: of the figure.

    Raises:
        ValueError: no run.
    """
    if not runs:
        raise ValueError("draw_steps() needs a run or more.")
    with course_style():
        figure = Figure(figsize=(9.0, 3.6), layout="constrained")
        panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, (name, steps) in zip(panels, runs.items(), strict=True):
            places = range(len(steps))
            peaks = [step.peak_bytes / MIB for step in steps]
            axes.bar(places, peaks, color=_WELL, label="peak alive in the step (measured)")
            axes.step(
                places,
                [step.reserved_bytes / MIB for step in steps],
                where="mid",
                color=_SICK,
                linewidth=2,
                label="reserved after it (simulated)",
            )
            axes.set_xticks(places, names[name], fontsize=9)
            axes.set_xlabel("tokens of the step's texts")
            axes.grid(False, axis="x")
            axes.set_title(name, fontsize=12)
        most = max(step.reserved_bytes for steps in runs.values() for step in steps)
        panels[0].set_ylim(0, 1.1 * max(most, limit_bytes) / MIB)
        for axes in panels:
            _limit(axes, limit_bytes, named=axes is panels[0])
        panels[0].set_ylabel("memory (MiB)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED, Evidence.SIMULATED])
    return figure


__all__ = [
    "FullCard",
    "PatientBytes",
    "Segment",
    "draw_alive",
    "draw_four_ways",
    "draw_peak",
    "draw_segments",
    "draw_steps",
    "draw_ward",
]

check_public(globals())
