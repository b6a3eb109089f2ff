"""Steps against time, for runs that are broken off and go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.ranks.recovery import ElasticRun
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

# Colour, line and width by order of first appearance; apart in grey as well.
_LOOKS = [
    ("#1170aa", "-", 2.6),
    ("#e76300", "--", 2.6),
    ("#4d4d4d", ":", 2.6),
    ("#832db6", "-.", 2.6),
]


class Stretch(NamedTuple):
    """A part of a run: (seconds, step) at the end of each step; its label has one look."""

    label: str
    points: Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A moment to be marked, such as a fault."""

    seconds: float
    text: str


class Progress(NamedTuple):
    """What one panel shows."""

    stretches: Sequence[Stretch]
    marks: Sequence[Mark] = ()


def progress_of(run: ElasticRun, zero_seconds: float = 0.0) -> Progress:
    """A job's generations of ranks as stretches, its faults as marks.

    `zero_seconds` after the launch is where time begins in the drawing: 0, or that of a fault.
    """
    stretches: list[Stretch] = []
    points: list[tuple[float, float]] = []
    for moment in run.moments:
        at = moment.seconds - zero_seconds
        if moment.what == "start" and moment.rank == 0:
            world, points = moment.more["world"], [(at, moment.more["step"])]
            stretches.append(Stretch(f"{world} rank{'s' * (world > 1)}", points))
        elif moment.what == "step" and moment.rank == 0 and points:
            points.append((at, moment.more["step"] + 1))
    names = {"fault": None, "link is back": "link is back"}
    marks = [
        Mark(m.seconds - zero_seconds, names[m.what] or str(m.more["kind"]))
        for m in run.moments
        if m.what in names
    ]
    return Progress(stretches, marks)


def draw_progress(
    panels: Mapping[str, Progress],
    *,
    title: str,
    since: str = "the launch",
    evidence: Evidence = Evidence.MEASURED,
    device: str = "",
) -> Figure:
    """One panel a run, on one time axis: lines where steps are done, gaps where nobody works.

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
        figure = Figure(figsize=(9.0, 0.9 + 2.5 * len(panels)), layout="constrained")
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
        figure.legend(list(handles.values()), list(handles), loc="outside right upper")
        print_evidence(figure, [evidence], [device])
    return figure


def _draw(axes: Axes, panel: Progress, labels: Sequence[str]) -> None:
    for stretch in panel.stretches:
        color, line, width = _LOOKS[labels.index(stretch.label)]
        seconds, steps = zip(*stretch.points, strict=True)
        axes.plot(seconds, steps, line, color=color, lw=width, label=stretch.label)
        axes.plot(seconds[:1], steps[:1], "o", color=color, ms=5)
    highest = max((s for stretch in panel.stretches for _, s in stretch.points), default=1)
    axes.set_ylim(-0.04 * highest, 1.32 * highest)
    close, last = 0, -1e9
    span = max((t for stretch in panel.stretches for t, _ in stretch.points), default=1)
    for mark in sorted(panel.marks):
        close = (close + 1) % 3 if mark.seconds - last < 0.16 * span else 0
        last = mark.seconds
        axes.axvline(mark.seconds, color="#bd1f01", lw=1.2, ls=(0, (4, 2)))
        axes.annotate(
            mark.text,
            (mark.seconds, (0.985 - 0.085 * close) * 1.32 * highest),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9.5,
            color="#8c1500",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
        )


__all__ = ["Mark", "Progress", "Stretch", "draw_progress", "progress_of"]

check_public(globals())
