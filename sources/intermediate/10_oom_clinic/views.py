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

_SICK, _WELL, _FREE, _EDGE, _OUTSIDE = "#bd1f01", "#3f90da", "#ffffff", "#717581", "#ffa90e"
_SMALL_SEGMENT_BYTES = 2 * MIB
_LEAST_STRETCH = 0.4  # of the axis, for what comes after the last step
_NARROWEST_NAME = 0.0092  # of the axis, for a character
_WIDTH_POWER = 0.3  # a phase of n events is as wide as n to this power


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
                _segment(axes, number, segment)
                _note_small(axes, number, segment)
            if name in asked:
                _asked(axes, len(segments), asked[name])
            axes.set_xlim(0, 1.05 * most / MIB)
            axes.set_title(f"{name}\n{format_bytes(_reserved(segments))} reserved", fontsize=12)
            axes.set_xlabel("size of the segment (MiB)")
            axes.grid(False, axis="y")
        panels[0].set_ylim(count - 0.3, -0.7)
        panels[0].set_ylabel("segments")
        panels[0].set_yticks([])
        figure.legend(handles=_legend(rows, names or {}), loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.SIMULATED])
    return figure


def _reserved(segments: Sequence[Segment]) -> int:
    return sum(size for segment in segments for size, _ in segment.blocks)


def _legend(rows: Mapping[str, Sequence[Segment]], names: Mapping[str, str]) -> list[Patch]:
    taken = {name for row in rows.values() for s in row for size, name in s.blocks if size > MIB}
    looks = [(names.get(name, name), LOOKS[Category(name)]) for name in sorted(taken - {""})]
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
        for name, size in blocks.items():
            axes.barh(0, size / MIB, left=left, height=0.7, color="#92dadd", edgecolor="white")
            text = f"{wrapped(name)}\n{size / MIB:.1f} MiB"
            axes.text(left + size / MIB / 2, 0, text, ha="center", va="center", fontsize=9)
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


def _limit(axes, limit_bytes: int, *, upright: bool = False) -> None:
    """The budget, as a dashed line with its name."""
    at = limit_bytes / MIB
    line = axes.axvline if upright else axes.axhline
    line(at, color="black", linewidth=1.5, linestyle="--", zorder=0.9 if upright else 2)
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
        panels[0].set_ylim(0, 1.2 * max(f.run.peak_bytes for f in runs.values()) / MIB)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _alive(axes, found: Examination, after_last: str = "") -> None:
    """All bytes alive after each allocator event, with the ends of steps."""
    timeline = found.run.timeline
    curve = timeline.alive_bytes / MIB
    ends = np.searchsorted(timeline.times_ns, step_ends(found), side="right")
    names = [str(number) for number in range(1, len(ends) + 1)]
    if after_last:
        ends, names = np.append(ends, len(curve)), [*names, after_last]
    starts = np.concatenate([[0], ends[:-1]])
    places = _places(len(curve), int(starts[-1])) if after_last else np.arange(len(curve) + 1.0)
    axes.fill_between(places[:-1], 0, curve, step="post", color=_WELL, linewidth=0)
    for end in ends[:-1]:
        axes.axvline(places[end], color=_EDGE, linewidth=0.6)
    peaks = [
        first + int(curve[first:end].argmax()) for first, end in zip(starts, ends, strict=True)
    ]
    axes.plot(places[peaks], curve[peaks], "v", color="black", markersize=4, zorder=3)
    _name_highest(axes, places, curve)
    axes.set_xticks((places[starts] + places[ends]) / 2, names)
    axes.set_xlim(0, places[-1])
    axes.set_ylim(0, 1.25 * max(curve.max(), found.patient.limit_bytes / MIB))
    axes.set_xlabel("step, by allocator events; \N{BLACK DOWN-POINTING TRIANGLE} its peak")
    axes.grid(False, axis="x")
    _limit(axes, found.patient.limit_bytes)


def _places(count: int, last: int) -> np.ndarray:
    """Where events stand, and the end: those from `last` on take a share of the axis at least."""
    places = np.arange(count + 1.0)
    wanted = last * _LEAST_STRETCH / (1 - _LEAST_STRETCH)
    factor = max(1.0, wanted / max(count - last, 1))
    return np.where(places > last, last + (places - last) * factor, places)


def _name_highest(axes, places: np.ndarray, curve: np.ndarray) -> None:
    """The number of the highest peak, which decides."""
    at = int(curve.argmax())
    axes.annotate(
        f"{curve[at]:.1f} MiB",
        (places[at], curve[at]),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right" if places[at] > 0.85 * places[-1] else "center",
        fontsize=9,
    )


def draw_stacked(found: Examination, *, title: str, steps: int = 2) -> Figure:
    """What is alive by category through a run's first steps, its phases named, against the budget."""
    timeline = found.run.timeline
    last = int(np.searchsorted(timeline.times_ns, step_ends(found)[steps - 1], side="right"))
    phases = _phases(found, last)
    places = _by_phase(phases, last)
    with course_style():
        figure, axes = empty_figure(height=4.2)
        floor = np.zeros(last)
        for category, curve in timeline.series().items():
            look, top = LOOKS[category], floor + curve[:last] / MIB
            axes.fill_between(
                places[:-1],
                floor,
                top,
                step="post",
                label=str(category) if curve.max() > timeline.peak_bytes / 50 else "",
                facecolor=look.color,
                hatch=look.hatch,
                edgecolor="white",
                linewidth=0,
            )
            floor = top
        _name_phases(axes, phases, places)
        at = int(floor.argmax())
        axes.plot(places[at], floor[at], "v", color="black", markersize=6, zorder=3)
        _name_highest(axes, places, floor)
        axes.set_xlim(0, places[-1])
        axes.set_xticks([])
        axes.set_ylim(0, 1.2 * max(floor.max(), found.patient.limit_bytes / MIB))
        axes.set_xlabel("allocator events, in order; short phases drawn wider")
        axes.set_ylabel("alive (MiB)")
        axes.set_title(title, pad=22)
        _limit(axes, found.patient.limit_bytes)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _phases(found: Examination, last: int) -> list[tuple[str, int, int]]:
    """Each phase with its first event and the one behind its last, as far as those are drawn."""
    timeline, found_phases = found.run.timeline, []
    for span in timeline.spans:
        edges = np.searchsorted(timeline.times_ns, (span.start_ns, span.end_ns))
        left, right = (min(int(index), last) for index in edges)
        found_phases += [(span.name, left, right)] if right > left else []
    return found_phases


def _by_phase(phases: Sequence[tuple[str, int, int]], last: int) -> np.ndarray:
    """Where events stand, and the end: a phase of few events is wider than their share."""
    widths = np.ones(last)
    for _, left, right in phases:
        widths[left:right] = (right - left) ** (_WIDTH_POWER - 1)
    return np.concatenate([[0.0], np.cumsum(widths)])


def _name_phases(axes, phases: Sequence[tuple[str, int, int]], places: np.ndarray) -> None:
    """A line where a phase begins, and its name above where there is room for it."""
    for name, left, right in phases:
        start, end = places[left], places[right]
        axes.axvline(start, color=_EDGE, linewidth=0.6)
        if end - start > _NARROWEST_NAME * len(name) * places[-1]:
            axes.annotate(
                name,
                ((start + end) / 2, 1.01),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                fontsize=8,
            )


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


def _pieces(axes, pieces: Pieces) -> None:
    """Each segment with its blocks, what was asked for, and what lies outside of all segments."""
    segments, reserved = pieces.segments, _reserved(pieces.segments)
    for number, segment in enumerate(segments):
        _segment(axes, number, segment)
    _asked(axes, len(segments), pieces.asked_bytes)
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
    handles = _legend({"": segments}, pieces.names)
    axes.legend(handles=handles, loc="upper right", fontsize=8, borderaxespad=0.2)


def _card(axes, card: FullCard) -> None:
    """A bar for each part of a card, each where the one before ends."""
    left = 0.0
    for row, (name, size) in enumerate(card.parts.items()):
        is_free = name == "free"
        color = _FREE if is_free else _OUTSIDE if name in card.not_pytorch else _WELL
        hatch = "//" if color == _OUTSIDE else ""
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
            reserved = [step.reserved_bytes / MIB for step in steps]
            axes.step(
                [place + 0.4 for place in (*places, len(steps))],  # behind its step's bar
                [*reserved, reserved[-1]],
                where="post",
                color=_SICK,
                linewidth=2,
                label="reserved after it (simulated)",
            )
            axes.set_xticks(places, names[name], fontsize=9)
            axes.set_xlabel("tokens of the step's texts")
            axes.grid(False, axis="x")
            axes.set_title(name, fontsize=12)
        most = max(step.reserved_bytes for steps in runs.values() for step in steps)
        most_steps = max(map(len, runs.values()))
        panels[0].set_ylim(0, 1.1 * max(most, limit_bytes) / MIB)
        for axes in panels:
            _limit(axes, limit_bytes)
            axes.set_xlim(-0.6, most_steps - 0.3)
        panels[0].set_ylabel("memory (MiB)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.MEASURED, Evidence.SIMULATED])
    return figure


__all__ = [
    "FullCard",
    "PatientBytes",
    "Pieces",
    "Segment",
    "draw_alive",
    "draw_four_ways",
    "draw_peak",
    "draw_segments",
    "draw_stacked",
    "draw_steps",
    "draw_ward",
]

check_public(globals())
