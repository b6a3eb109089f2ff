"""A pipeline schedule as it runs: who works on which micro-batch when, and who waits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.parallel.actions import Action, Program
from utils.planner import Estimate
from utils.planner.schedules import Run, bubble_closed, in_flight, run_schedule, schedule_actions
from utils.planner.step_seconds.block_time import block_time
from utils.rules import whole
from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

# Colours that no category of memory has beside it, far apart in grey too.
FORWARD, BACKWARD, WEIGHTS, IDLE = "#92dadd", "#717581", "#ffa90e", "#f2f2f2"
LOOKS = {"F": (FORWARD, ""), "B": (BACKWARD, ""), "I": (BACKWARD, ""), "W": (WEIGHTS, "///")}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the input",
    "W": "backward to the weights",
}
LATER_CHUNK = 0.45  # opacity of every second chunk, where stages interleave
MOST_ASKED = 512  # micro-batches that a caller may ask for
MOST_DRAWN = 16  # micro-batches; more are lines too thin to see
MOST_NUMBERED = 180  # pieces of work in all rows
MOST_EDGED = 64  # pieces of work in one row: white edges between more make stripes of their own
LEAST_RUN = 0.012  # of the time drawn, that a run of one chunk must take to be numbered

Span = tuple[Action, int, float, float]  # what, in which of the rank's chunks, from, to


class Panel(NamedTuple):
    """A schedule that ran: its program, when each action ran, and where the times come from."""

    rows: Program
    result: Run
    evidence: Evidence = Evidence.PREDICTED


def drawn_micro_batches(found: Estimate, most: int = MOST_DRAWN) -> int:
    """Micro-batches that a drawing shows: all, or as many whole rounds of stages as fit `most`."""
    stages = found.plan.pp
    m = found.plan.micro_batches(found.batch)
    if m <= max(most, stages):
        return m
    return max(1, most // stages) * stages


def executed(found: Estimate, micro_batches: int | None = None) -> tuple[list[list[Action]], Run]:
    """The plan's schedule, run with the planner's seconds for its blocks.

    Stages are taken as alike: embedding, head and sends are left out.

    Args:
        found: The plan.
        micro_batches: How many; None for all of the batch.
    """
    plan = found.plan
    m = plan.micro_batches(found.batch) if micro_batches is None else micro_batches
    rows = schedule_actions(plan.schedule, plan.pp, m, plan.virtual_stages)
    block = block_time(found.model, found.cluster, plan, found.batch)
    layers = found.model.layers / plan.pp / plan.virtual_stages
    backward = block.backward.total + block.recompute.total
    return rows, run_schedule(rows, layers * block.forward.total, layers * backward)


def draw_schedule(found: Estimate, *, micro_batches: int | None = None, title: str = "") -> Figure:
    """The schedule of a step as bars over time, one row a stage.

    Args:
        found: The plan.
        micro_batches: How many to draw; None for a number that can be seen.
        title: Of the figure.

    Raises:
        ValueError: micro-batches that cannot be drawn.
    """
    if micro_batches is not None:
        whole("draw_schedule", most=MOST_ASKED, micro_batches=micro_batches)
    with course_style():
        figure, axes = empty_figure(height=1.9 + 0.33 * found.plan.pp)
        handles = draw_rows(axes, found, micro_batches)
        if title:
            axes.set_title(title)
        figure.legend(handles=handles, loc="outside right upper")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def draw_schedules(
    panels: Mapping[str, Panel],
    *,
    title: str = "",
    unit: str = "time of a forward pass",
    width: float = 11.0,
) -> Figure:
    """Schedules below each other on one axis of time: drawn, measured, or both.

    Each heading says how long the bubble is beside the work, and how many micro-batches each rank
    holds at most, from the first to the last; one in one of two chunks counts half.

    Args:
        panels: what ran, by name, from top to bottom.
        title: of the figure.
        unit: of the times.
        width: in inches.
    """
    if not panels:
        raise ValueError("draw_schedules: panels is empty; give one schedule or more.")
    longest = max(panel.result.total for panel in panels.values())
    with course_style():
        rows = [len(panel.rows) for panel in panels.values()]
        figure = Figure(
            figsize=(width, 0.9 + sum(0.72 + 0.27 * n for n in rows)), layout="constrained"
        )
        every = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (name, panel) in zip(every, panels.items(), strict=True):
            draw_program(axes, panel.rows, panel.result, longest, first=0)
            chunks = _chunks(panel.rows)
            held = ", ".join(f"{in_flight(row) / chunks:g}" for row in panel.rows)
            axes.set_title(
                f"{name} ({panel.evidence}): bubble {panel.result.bubble_ratio:.1%} of "
                f"the work; in flight {held}",
                fontsize=10,
            )
            axes.set_ylabel("rank")
        every[-1].set_xlabel(unit)
        kinds = {a.kind for panel in panels.values() for row in panel.rows for a in row}
        most = max(_chunks(panel.rows) for panel in panels.values())
        figure.legend(handles=_legend(most, True, kinds), loc="outside lower center", ncols=4)
        if title:
            figure.suptitle(title, fontsize=12)
        print_evidence(figure, {panel.evidence for panel in panels.values()})
    return figure


def draw_rows(axes: Axes, found: Estimate, micro_batches: int | None = None) -> list[Patch]:
    """Draw the plan's schedule into `axes`; returns the legend's entries."""
    m = drawn_micro_batches(found) if micro_batches is None else micro_batches
    rows, result = executed(found, m)
    numbered = draw_program(axes, rows, result, result.total)
    axes.set_xlabel("seconds")
    axes.set_ylabel("pipeline stage")
    axes.set_title(_heading(found, m, result))
    return _legend(found.plan.virtual_stages, numbered, {"F", "B"})


def draw_program(axes: Axes, rows: Program, result: Run, until: float, *, first: int = 1) -> bool:
    """Draw a schedule that ran, up to a time; returns whether micro-batches are numbered.

    `first`: the number of the first micro-batch; 0 as in the names of actions.
    """
    chunks, longest = _chunks(rows), max(map(len, rows))
    numbered = len(rows) * longest <= MOST_NUMBERED
    for rank, row in enumerate(rows):
        axes.broken_barh([(0, result.total)], (rank - 0.42, 0.84), color=IDLE, zorder=1)
        places = (action.stage // len(rows) for action in row)
        spans = list(zip(row, places, result.starts[rank], result.ends[rank], strict=True))
        _draw_row(axes, rank, spans, 0.5 if len(row) <= MOST_EDGED else 0.0)
        if numbered:
            _number_row(axes, rank, spans, first)
        elif chunks > 1:
            _number_chunks(axes, rank, spans, LEAST_RUN * result.total)
    axes.set_xlim(0, until)
    axes.set_yticks(range(0, len(rows), -(-len(rows) // 16)))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(False)
    return numbered


def _chunks(rows: Program) -> int:
    """Of each rank."""
    return 1 + max(action.stage for row in rows for action in row) // len(rows)


def _legend(chunks: int, numbered: bool, kinds: set[str]) -> list[Patch]:
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=NAMES[kind])
        for kind, (color, hatch) in LOOKS.items()
        if kind in kinds and not (kind == "I" and "B" in kinds)
    ]
    handles.append(Patch(facecolor=IDLE, label="idle: the bubble"))
    if chunks > 1:
        odd = ", ".join(str(n) for n in range(1, chunks + 1, 2))
        even = ", ".join(str(n) for n in range(2, chunks + 1, 2))
        handles.append(Patch(facecolor=FORWARD, label=f"dark: chunk {odd}"))
        handles.append(Patch(facecolor=FORWARD, alpha=LATER_CHUNK, label=f"light: chunk {even}"))
    what = "number: micro-batch" if numbered else "number: chunk" if chunks > 1 else ""
    return handles + ([Patch(facecolor="none", label=what)] if what else [])


def _draw_row(axes: Axes, rank: int, spans: list[Span], edge: float) -> None:
    """One artist for each colour of a row: thousands of them would take seconds to draw."""
    for (color, hatch), odd in itertools.product(dict.fromkeys(LOOKS.values()), (False, True)):
        bars = [
            (start, end - start)
            for action, chunk, start, end in spans
            if LOOKS[action.kind] == (color, hatch) and chunk % 2 == odd
        ]
        if bars:
            axes.broken_barh(
                bars,
                (rank - 0.42, 0.84),
                facecolors=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=edge,
                alpha=LATER_CHUNK if odd else 1.0,
                zorder=2,
            )


def _number_chunks(axes: Axes, rank: int, spans: list[Span], least: float) -> None:
    """The number of a chunk on each run of it that is long enough to be read."""
    for kind, chunk, start, end in _runs(spans, least / 100):
        if end - start >= least:
            _write(axes, kind, chunk, str(chunk + 1), (start + end) / 2, rank, 7)


def _runs(spans: list[Span], gap: float) -> list[tuple[str, int, float, float]]:
    """Pieces of one chunk and direction that follow without a gap: what, and from when to when."""
    found: list[tuple[str, int, float, float]] = []
    for action, chunk, start, end in spans:
        if found and found[-1][:2] == (action.kind, chunk) and start - found[-1][3] < gap:
            start = found.pop()[2]
        found.append((action.kind, chunk, start, end))
    return found


def _number_row(axes: Axes, rank: int, spans: list[Span], first: int) -> None:
    for action, chunk, start, end in spans:
        text = str(action.micro_batch + first)
        _write(axes, action.kind, chunk, text, (start + end) / 2, rank, 8)


def _write(axes: Axes, kind: str, chunk: int, text: str, x: float, rank: int, size: int) -> None:
    is_dark = LOOKS[kind][0] == BACKWARD and chunk % 2 == 0
    color = "white" if is_dark else "black"
    axes.text(
        x,
        rank,
        text,
        ha="center",
        va="center",
        fontsize=size,
        zorder=3,
        in_layout=False,
        color=color,
    )


def _heading(found: Estimate, drawn: int, result: Run) -> str:
    plan, m = found.plan, found.plan.micro_batches(found.batch)
    text = f"{drawn:,} micro-batches: idle {result.bubble_ratio:.1%} of the work"
    if drawn == m:
        return text
    return f"{text}; all {m:,}: {bubble_closed(plan.pp, m, plan.virtual_stages):.1%}"
