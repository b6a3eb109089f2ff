"""A pipeline schedule as it runs: who works on which micro-batch when, and who waits."""

from __future__ import annotations

import itertools

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.planner import Estimate
from utils.planner.block_time import block_time
from utils.planner.schedules import Run, Work, bubble_closed, order, run
from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

# Colours that no category of memory has beside it, far apart in grey too.
FORWARD, BACKWARD, IDLE = "#92dadd", "#717581", "#f2f2f2"
LATER_CHUNK = 0.45  # opacity of every second chunk, where stages interleave
MOST_DRAWN = 16  # micro-batches; more are lines too thin to see
MOST_NUMBERED = 180  # pieces of work in all rows
MOST_EDGED = 64  # pieces of work in one row: white edges between more make stripes of their own
LEAST_RUN = 0.012  # of the time drawn, that a run of one chunk must take to be numbered

Span = tuple[Work, float, float]  # what, from, to


def drawn_micro_batches(found: Estimate, most: int = MOST_DRAWN) -> int:
    """Micro-batches that a drawing shows: all, or as many whole rounds of stages as fit `most`."""
    stages = found.plan.pp
    m = found.plan.micro_batches(found.batch)
    if m <= max(most, stages):
        return m
    return max(1, most // stages) * stages


def executed(found: Estimate, micro_batches: int | None = None) -> tuple[list[list[Work]], Run]:
    """The plan's schedule, run with the planner's seconds for its blocks.

    Stages are taken as alike: embedding, head and sends are left out.

    Args:
        found: The plan.
        micro_batches: How many; None for all of the batch.
    """
    plan = found.plan
    m = plan.micro_batches(found.batch) if micro_batches is None else micro_batches
    rows = order(plan.schedule, plan.pp, m, plan.virtual_stages)
    block = block_time(found.model, found.cluster, plan, found.batch)
    layers = found.model.layers / plan.pp / plan.virtual_stages
    backward = block.backward.total + block.recompute.total
    return rows, run(rows, layers * block.forward.total, layers * backward,
                     chunks=plan.virtual_stages)  # fmt: skip


def draw_schedule(found: Estimate, *, micro_batches: int | None = None, title: str = "") -> Figure:
    """The schedule of a step as bars over time, one row a stage.

    Args:
        found: The plan.
        micro_batches: How many to draw; None for a number that can be seen.
        title: Of the figure.
    """
    with course_style():
        figure, axes = empty_figure(height=1.9 + 0.33 * found.plan.pp)
        handles = draw_rows(axes, found, micro_batches)
        if title:
            axes.set_title(title)
        figure.legend(handles=handles, loc="outside right upper")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def draw_rows(axes: Axes, found: Estimate, micro_batches: int | None = None) -> list[Patch]:
    """Draw the schedule into `axes`; returns the legend's entries."""
    m = drawn_micro_batches(found) if micro_batches is None else micro_batches
    rows, result = executed(found, m)
    numbered = len(rows) * len(rows[0]) <= MOST_NUMBERED
    for stage, row in enumerate(rows):
        axes.broken_barh([(0, result.total)], (stage - 0.42, 0.84), color=IDLE, zorder=1)
        spans = list(zip(row, result.starts[stage], result.ends[stage], strict=True))
        _draw_row(axes, stage, spans, 0.5 if len(row) <= MOST_EDGED else 0.0)
        if numbered:
            _number_row(axes, stage, spans)
        elif found.plan.virtual_stages > 1:
            _number_chunks(axes, stage, spans, LEAST_RUN * result.total)
    axes.set_xlim(0, result.total)
    axes.set_yticks(range(0, len(rows), -(-len(rows) // 16)))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("seconds")
    axes.set_ylabel("pipeline stage")
    axes.grid(False)
    axes.set_title(_heading(found, m, result))
    return _legend(found.plan.virtual_stages, numbered)


def _legend(chunks: int, numbered: bool) -> list[Patch]:
    names = {"forward": FORWARD, "backward": BACKWARD, "idle: the bubble": IDLE}
    handles = [Patch(facecolor=color, label=name) for name, color in names.items()]
    if chunks > 1:
        odd = ", ".join(str(n) for n in range(1, chunks + 1, 2))
        even = ", ".join(str(n) for n in range(2, chunks + 1, 2))
        handles.append(Patch(facecolor=FORWARD, label=f"dark: chunk {odd}"))
        handles.append(Patch(facecolor=FORWARD, alpha=LATER_CHUNK, label=f"light: chunk {even}"))
    what = "number: micro-batch" if numbered else "number: chunk" if chunks > 1 else ""
    return handles + ([Patch(facecolor="none", label=what)] if what else [])


def _draw_row(axes: Axes, stage: int, spans: list[Span], edge: float) -> None:
    """One artist for each colour of a row: thousands of them would take seconds to draw."""
    for forward, odd in itertools.product((True, False), (False, True)):
        bars = [(start, end - start) for work, start, end in spans
                if work.forward == forward and work.chunk % 2 == odd]  # fmt: skip
        axes.broken_barh(
            bars, (stage - 0.42, 0.84), facecolors=FORWARD if forward else BACKWARD,
            edgecolor="white", linewidth=edge, alpha=LATER_CHUNK if odd else 1.0, zorder=2,
        )  # fmt: skip


def _number_chunks(axes: Axes, stage: int, spans: list[Span], least: float) -> None:
    """The number of a chunk on each run of it that is long enough to be read."""
    for forward, chunk, start, end in _runs(spans, least / 100):
        if end - start >= least:
            axes.text((start + end) / 2, stage, str(chunk + 1), ha="center", va="center",
                      fontsize=7, zorder=3, in_layout=False,
                      color="black" if forward else "white")  # fmt: skip


def _runs(spans: list[Span], gap: float) -> list[tuple[bool, int, float, float]]:
    """Pieces of one chunk and direction that follow without a gap: what, and from when to when."""
    found: list[tuple[bool, int, float, float]] = []
    for work, start, end in spans:
        if found and found[-1][:2] == (work.forward, work.chunk) and start - found[-1][3] < gap:
            start = found.pop()[2]
        found.append((work.forward, work.chunk, start, end))
    return found


def _number_row(axes: Axes, stage: int, spans: list[Span]) -> None:
    for work, start, end in spans:
        axes.text((start + end) / 2, stage, str(work.micro_batch + 1), ha="center", va="center",
                  fontsize=8, zorder=3, in_layout=False,
                  color="black" if work.forward else "white")  # fmt: skip


def _heading(found: Estimate, drawn: int, result: Run) -> str:
    plan, m = found.plan, found.plan.micro_batches(found.batch)
    text = f"{drawn:,} micro-batches: idle {result.bubble_ratio:.1%} of the working time"
    if drawn == m:
        return text
    return f"{text}; all {m:,}: {bubble_closed(plan.pp, m, plan.virtual_stages):.1%}"
