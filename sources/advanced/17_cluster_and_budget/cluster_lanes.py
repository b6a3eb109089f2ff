"""On which nodes of a cluster a job ran, and when; how long it waited, and what befell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .clusters.jobs import JobSpan

JOB, DEAD, QUEUED = "#92dadd", "#ffa90e", "#e6e6e6"
STARTS, TRAINS = "job starts, until it has a new save", "job goes on from there"
WAITS, KILLED, WAITING = "job holds the node, no step runs", "node is dead", "in the queue"
# What a bar means, in the legend's order: its fill and its hatch, which tell all apart in grey too.
_LOOKS = {
    STARTS: (JOB, "//"),
    TRAINS: (JOB, ""),
    WAITS: ("#ffffff", ""),
    KILLED: (DEAD, "\\\\\\"),
    WAITING: (QUEUED, ""),
}
_Bar = tuple[str, float, float, str]  # what it is, start, end, what is written on it


def draw_cluster(
    history: Sequence[JobSpan],
    nodes: Sequence[str],
    *,
    title: str,
    killed: Mapping[str, float] | None = None,
    trains: Sequence[float] = (),
    marks: Mapping[str, float] | None = None,
    evidence: Evidence = Evidence.MEASURED,
    device: str = "",
) -> Figure:
    """One lane a node, and one for the job while it waits.

    Args:
        history: what was seen of one job.
        nodes: in order.
        title: of the figure.
        killed: nodes that died, and when, on the clock of the history.
        trains: when each start of the job had a new save; before that it imports, loads and does its first steps.
        marks: what befell the job, and when; numbered in the picture.
        evidence: measured, or recorded.
        device: on which machine.

    Raises:
        ValueError: nothing ran.
    """
    if not any(span.state in ("RUNNING", "PENDING") for span in history):
        raise ValueError("draw_cluster: history holds no job that ran or waited; nothing to draw.")
    ends = max(span.end_seconds for span in history if span.state in ("RUNNING", "PENDING"))
    lanes: dict[str, list[_Bar]] = {node: [] for node in nodes}
    for span in history:
        if span.state == "PENDING":
            lane = lanes.setdefault(f"queue: {span.name}", [])
            lane.append((WAITING, *_seen(span, ends), ""))
        for node in span.node_names if span.state == "RUNNING" else ():
            lanes[node] += _of_job(span, node, killed or {}, trains, ends)
    for node, when in (killed or {}).items():
        lanes[node].append((KILLED, when, ends, ""))
    with course_style():
        figure, axes = empty_figure(
            width=9.6, height=2.3 + 0.5 * len(lanes) + 0.26 * len(marks or {})
        )
        _draw(axes, lanes)
        _mark(axes, list((marks or {}).values()), ends)
        axes.set_title(title, pad=36 if marks else 6)
        _name(figure, lanes, list(marks or {}))
        print_evidence(figure, [evidence], [device])
    return figure


def draw_troubles(seen: Mapping[str, Any], *, evidence: Evidence, device: str) -> Figure:
    """The lesson's job from its account: `n2` is killed in its first start, the second is sent USR1."""
    history = [JobSpan(**span) for span in seen["history"]]
    runs = [span for span in history if span.state == "RUNNING"]
    first, second, third = (next(s for s in runs if s.restarts == number) for number in range(3))
    marks = {
        "n2 is killed": seen["killed"],
        "Slurm declares n2 down and requeues the job": first.end_seconds,
        "start 2: cred_expire (5 s) has passed since the requeue": second.start_seconds,
        "USR1 comes: the job saves, ends with 75, and its script requeues it": seen["signalled"],
        "start 3: cred_expire (5 s) has passed since the requeue": third.start_seconds,
    }
    title = "Two restarts that nobody typed: after a dead node, and after a signal"
    return draw_cluster(history, ["n1", "n2", "n3"], title=title, killed={"n2": seen["killed"]},
                        trains=seen["trains"], marks=marks, evidence=evidence, device=device)  # fmt: skip


def _seen(span: JobSpan, ends: float) -> tuple[float, float]:
    """Start and end of what was seen; a look alone is a hundredth of the figure wide."""
    return span.start_seconds, max(span.end_seconds, span.start_seconds + 0.01 * ends)


def _of_job(
    span: JobSpan, node: str, killed: Mapping[str, float], trains: Sequence[float], ends: float
) -> list[_Bar]:
    """Bars of one start on one node: it starts, goes on, and waits where another of its nodes is dead."""
    start, end = _seen(span, ends)
    first = trains[span.restarts] if span.restarts < len(trains) else start
    deaths = [killed[name] for name in span.node_names if start < killed.get(name, 0) < end]
    stops = min([end, *deaths])
    words = f"start {span.restarts + 1}"
    found = [(STARTS, start, first, words if first > start else ""), (TRAINS, first, stops, "")]
    if stops < end and node not in killed:
        found.append((WAITS, stops, end, ""))
    return [bar for bar in found if bar[2] > bar[1]]


def _draw(axes: Axes, lanes: Mapping[str, Sequence[_Bar]]) -> None:
    for row, bars in enumerate(lanes.values()):
        for kind, start, end, words in bars:
            color, hatch = _LOOKS[kind]
            edge = "#555555" if color in ("#ffffff", JOB) else "white"
            axes.barh(row, end - start, left=start, height=0.62, color=color, hatch=hatch,
                      edgecolor=edge, linewidth=0.8)  # fmt: skip
            plain = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            axes.text((start + end) / 2, row, words, ha="center", va="center", fontsize=9,
                      bbox=plain if words else None)  # fmt: skip
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("time since Slurm's start (s)")


def _mark(axes: Axes, times: Sequence[float], ends: float) -> None:
    """A numbered line for each moment; where two are near, the later number stands a little higher."""
    last, raised = -ends, False
    for number, when in enumerate(times, start=1):
        raised = when - last < 0.022 * ends and not raised
        axes.axvline(when, color="black", linewidth=0.9, linestyle=":")
        axes.annotate(str(number), (when, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(0, 18 if raised else 4), textcoords="offset points", ha="center", fontsize=9,
                      bbox={"boxstyle": "circle,pad=0.15", "facecolor": "white"})  # fmt: skip
        last = when


def _name(figure: Figure, lanes: Mapping[str, Sequence[_Bar]], marks: Sequence[str]) -> None:
    seen = {bar[0] for bars in lanes.values() for bar in bars}
    kinds = [kind for kind in _LOOKS if kind in seen]
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="#555555")
        for color, hatch in map(_LOOKS.__getitem__, kinds)
    ]
    handles += [Patch(facecolor="none", edgecolor="none")] * len(marks)
    words = [f"{number}  {text}" for number, text in enumerate(marks, start=1)]
    figure.legend(handles, kinds + words, loc="outside lower left", ncols=2, fontsize=9)


__all__ = ["draw_cluster", "draw_troubles"]

check_public(globals())
