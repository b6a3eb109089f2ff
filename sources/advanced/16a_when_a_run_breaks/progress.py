"""Steps against time, for runs that are broken off and go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.ranks.recovery import ElasticRun, Moment, Recovery
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

# Colour, line and width by order of first appearance; apart in grey as well.
_LOOKS = [
    ("#1170aa", "-", 2.6),
    ("#e76300", "--", 2.6),
    ("#4d4d4d", ":", 2.6),
    ("#832db6", "-.", 2.6),
]
_GAPS = {"not yet noticed": ("#f3b8b0", "////"), "noticed, nobody trains": ("#e4e4e4", "....")}
_SHORTEST_ABSENCE = 5.0  # seconds: a host that is back sooner gets no mark of its own
_SHORTEST_NOTED = 5.0  # seconds: a shorter stretch has no room for its note
_SEEN = 0.5  # seconds: a shorter shade cannot be seen, so the legend does not name it


class Stretch(NamedTuple):
    """A part of a run: (seconds, step) at the end of each step; its label has one look.

    `note` stands beside its middle.
    """

    label: str
    points: Sequence[tuple[float, float]]
    note: str = ""


class Mark(NamedTuple):
    """A moment to be marked, such as a fault."""

    seconds: float
    text: str


class Gap(NamedTuple):
    """A time in which no step is done: from when to when, and when the first rank saw an error."""

    start: float
    noticed: float
    end: float


class Again(NamedTuple):
    """Steps that are done twice: when they begin anew, from which on, and how far they had come."""

    seconds: float
    first: float
    last: float


class Progress(NamedTuple):
    """What one panel shows."""

    stretches: Sequence[Stretch]
    marks: Sequence[Mark] = ()
    gaps: Sequence[Gap] = ()
    again: Sequence[Again] = ()


def progress_of(
    run: ElasticRun,
    zero_seconds: float = 0.0,
    *,
    last_step: float = float("inf"),
    rows_per_step: Mapping[int, int] | None = None,
) -> Progress:
    """A job's generations of ranks as stretches, its faults as marks, and what lies between.

    `zero_seconds` after the launch is where time begins in the drawing: 0, or that of a fault. Steps after
    `last_step` are left out. `rows_per_step`, by the number of ranks, is noted on each stretch.
    """
    stretches: list[Stretch] = []
    points: list[tuple[float, float]] = []
    for moment in run.moments:
        at = moment.seconds - zero_seconds
        if moment.what == "start" and moment.rank == 0:
            world, points = moment.more["world"], [(at, moment.more["step"])]
            note = f"{rows_per_step[world]} rows a step" if rows_per_step else ""
            stretches.append(Stretch(f"{world} rank{'s' * (world > 1)}", points, note))
        elif moment.what == "step" and moment.rank == 0 and points:
            if moment.more["step"] + 1 <= last_step:
                points.append((at, moment.more["step"] + 1))
    marks = [Mark(at - zero_seconds, text) for at, text in _marks(run.moments)]
    saw = [m.seconds - zero_seconds for m in run.moments if m.what == "saw"]
    gaps, again = _between(stretches, saw)
    return Progress(stretches, marks, gaps, again)


def _marks(moments: Sequence[Moment]) -> Iterator[tuple[float, str]]:
    world, last = 0, 0.0
    for m in moments:
        if m.what == "fault":
            yield m.seconds, str(m.more["kind"])
            if m.more["kind"] == "kill a host" and m.more["seconds"] >= _SHORTEST_ABSENCE:
                yield m.seconds + m.more["seconds"], "host is back"
        elif m.what == "link is back":
            yield m.seconds, m.what
        elif m.what == "start" and m.rank == 0:
            if 0 < world < m.more["world"]:
                yield last, "host 1 joins"
            world = m.more["world"]
        elif m.what == "step" and m.rank == 0:
            last = m.seconds


def _between(stretches: Sequence[Stretch], saw: Sequence[float]) -> tuple[list[Gap], list[Again]]:
    """Gaps between stretches, and steps that the later one does again."""
    gaps: list[Gap] = []
    again: list[Again] = []
    highest = 0.0
    for before, after in itertools.pairwise(stretches):
        (start, last), (end, first) = before.points[-1], after.points[0]
        highest = max(highest, last)
        gaps.append(Gap(start, min((s for s in saw if start <= s <= end), default=start), end))
        if first < highest:
            again.append(Again(end, first, highest))
    return gaps, again


def began_seconds(run: ElasticRun, found: Recovery) -> float | None:
    """When, after a fault, the processes of the next ranks began; None where they did not note it."""
    starts = [m for m in run.moments if m.what == "start" and m.seconds > found.at_seconds]
    born = [m.seconds - m.more["age_seconds"] for m in starts[:1] if "age_seconds" in m.more]
    return born[0] - found.at_seconds if born else None


def draw_progress(
    panels: Mapping[str, Progress],
    *,
    title: str,
    since: str = "the launch",
    evidence: Evidence = Evidence.MEASURED,
    device: str = "",
) -> Figure:
    """One panel a run, on one time axis: lines where steps are done, shades where nobody works.

    `since` says what time counts from.

    Raises:
        ValueError: there is nothing to draw, or more labels than looks.
    """
    labels = list(dict.fromkeys(s.label for panel in panels.values() for s in panel.stretches))
    if not labels or len(labels) > len(_LOOKS):
        raise ValueError(
            f"draw_progress() tells 1 to {len(_LOOKS)} labels apart; these are {len(labels)}."
        )
    with course_style():
        figure = Figure(figsize=(9.0, 1.6 + 2.7 * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (name, panel) in zip(rows, panels.items(), strict=True):
            _draw(axes, panel, labels)
            axes.set_ylabel("step")
            axes.set_title(name if len(panels) > 1 else title, loc="left", fontsize=12)
        if len(panels) > 1:
            figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        rows[-1].set_xlabel(f"seconds since {since}")
        handles = {
            label: line
            for axes in rows
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        gaps = [gap for panel in panels.values() for gap in panel.gaps]
        longest = (
            max((gap.noticed - gap.start for gap in gaps), default=0.0),
            max((gap.end - gap.noticed for gap in gaps), default=0.0),
        )
        shades = {
            name: Patch(facecolor=color, hatch=hatch, edgecolor="white")
            for (name, (color, hatch)), seconds in zip(_GAPS.items(), longest, strict=True)
            if seconds > _SEEN
        }
        shown = handles | shades
        figure.legend(list(shown.values()), list(shown), loc="outside lower left", ncols=4)
        print_evidence(figure, [evidence], [device])
    return figure


def _draw(axes: Axes, panel: Progress, labels: Sequence[str]) -> None:
    for stretch in panel.stretches:
        color, line, width = _LOOKS[labels.index(stretch.label)]
        seconds, steps = zip(*stretch.points, strict=True)
        axes.plot(seconds, steps, line, color=color, lw=width, label=stretch.label)
        axes.plot(seconds[:1], steps[:1], "o", color=color, ms=5)
        if seconds[-1] - seconds[0] > _SHORTEST_NOTED:
            place = stretch.points[len(stretch.points) // 3]
            axes.annotate(
                stretch.note, place, (6, -5), textcoords="offset points", va="top", fontsize=9
            )
    highest = max((s for stretch in panel.stretches for _, s in stretch.points), default=1)
    axes.set_ylim(-0.04 * highest, 1.36 * highest)
    _draw_gaps(axes, panel)
    _draw_marks(axes, panel, 1.36 * highest)


def _draw_gaps(axes: Axes, panel: Progress) -> None:
    for gap in panel.gaps:
        parts = ((gap.start, gap.noticed), (gap.noticed, gap.end))
        for (start, end), (color, hatch) in zip(parts, _GAPS.values(), strict=True):
            axes.axvspan(start, end, facecolor=color, hatch=hatch, edgecolor="white", lw=0)
    for seconds, first, last in panel.again:
        axes.plot([seconds, seconds], [first, last], color="black", lw=1.6)
        text = f"{last - first:.0f} step{'s' * (last - first > 1)}\nagain"
        axes.annotate(
            text, (seconds, last), (-3, 2), textcoords="offset points", ha="right", fontsize=9
        )


def _draw_marks(axes: Axes, panel: Progress, top: float) -> None:
    close, last = 0, -1e9
    times = [t for stretch in panel.stretches for t, _ in stretch.points]
    span = max(times) - min(times) if times else 1.0
    for mark in sorted(panel.marks):
        close = (close + 1) % 3 if mark.seconds - last < 0.16 * span else 0
        last = mark.seconds
        axes.axvline(mark.seconds, color="#bd1f01", lw=1.2, ls=(0, (4, 2)))
        axes.annotate(
            mark.text,
            (mark.seconds, (0.985 - 0.085 * close) * top),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9.5,
            color="#8c1500",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
        )


__all__ = [
    "Again", "Gap", "Mark", "Progress", "Stretch", "began_seconds", "draw_progress", "progress_of",
]  # fmt: skip

check_public(globals())
