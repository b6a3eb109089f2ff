"""Steps of a slow job as lanes: every backward pass that all-reduces ends with its own all-reduce.

Under each lane a thin strip shows when the network sends, also while backward hides it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.labs.slow_jobs import SlowJob
from utils.units import Evidence
from utils.views.lanes import Span, draw_lanes

# In the order in which `draw_lanes` gives out colours: backward and all-reduce first, as in the
# lesson's other lanes.
KINDS = ("backward", "all-reduce, not hidden", "waiting for a node", "loading", "forward")


def node_spans(job: SlowJob, node: int) -> list[Span]:
    """One node's step: it loads once, then goes through as many equal passes as are reduced.

    A trace adds the passes up; here each kind's time is shared out over them.
    """
    row, passes = job.step().stretches[node], job.reduced_passes
    spans, at = [], 0.0
    for number in range(passes):
        for kind, start, end in row:
            if kind == "loading" and number:
                continue
            seconds = (end - start) / (1 if kind == "loading" else passes)
            spans.append(Span(kind, at, at + seconds))
            at += seconds
    return spans


def step_lanes(job: SlowJob) -> dict[str, list[Span]]:
    """A lane a node."""
    return _coloured({f"node {node}": node_spans(job, node) for node in range(job.nodes)})


def cure_lanes(jobs: Mapping[str, SlowJob], node: int = 0) -> dict[str, list[Span]]:
    """A lane a job, of one node."""
    return _coloured({name: node_spans(job, node) for name, job in jobs.items()})


def _coloured(lanes: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """The same lanes, begun by spans of no length, so that each kind has its colour."""
    there = {span.kind for lane in lanes.values() for span in lane}
    first, *rest = lanes.items()
    begun = [Span(kind, 0.0, 0.0) for kind in KINDS if kind in there]
    return {first[0]: [*begun, *first[1]], **dict(rest)}


def sending(job: SlowJob) -> list[tuple[float, float]]:
    """Start and seconds of every all-reduce of a step, hidden or not.

    The slowest node fills each bucket last, and waits for nobody: its lane has the times.
    """
    trace = job.step()
    buckets = trace.buckets // job.reduced_passes
    each = trace.network_busy_seconds / trace.buckets
    waits = trace.seconds("waiting for a node")
    found, free = [], 0.0
    for span in node_spans(job, waits.index(min(waits))):
        if span.kind == "backward":
            one = (span.end_seconds - span.start_seconds) / buckets
            for number in range(1, buckets + 1):
                start = max(free, span.start_seconds + number * one)
                free = start + each
                found.append((start, each))
    return found


def _stretches(job: SlowJob) -> list[tuple[float, float, float]]:
    """Start and end of what each pass sends, and the share of that time in which it sends."""
    sent, found = sending(job), []
    buckets = len(sent) // job.reduced_passes
    for number in range(job.reduced_passes):
        part = sent[number * buckets : (number + 1) * buckets]
        start, end = part[0][0], sum(part[-1])
        found.append((start, end, sum(seconds for _, seconds in part) / (end - start)))
    return found


def draw_steps(
    lanes: Mapping[str, Sequence[Span]],
    jobs: Sequence[SlowJob],
    *,
    title: str,
    ends: Sequence[str] = (),
) -> Figure:
    """Lanes of simulated steps with what their network sends, in ms.

    Args:
        lanes: of `step_lanes` or `cure_lanes`.
        jobs: of each lane.
        title: of the figure.
        ends: words at each lane's end.
    """
    figure = draw_lanes(lanes, title=title, evidence=Evidence.SIMULATED)
    axes, strip = figure.axes[0], "#222222"
    for row, job in enumerate(jobs):
        for start, end, share in _stretches(job):
            thick = max(0.05, 0.14 * share)  # a thinner one would not be seen
            axes.barh(
                row + 0.41, 1e3 * (end - start), left=1e3 * start, height=thick, color=strip, lw=0
            )
    for row, (lane, words) in enumerate(zip(lanes.values(), ends, strict=False)):
        end = 1e3 * max(span.end_seconds for span in lane)
        axes.annotate(
            words, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    if ends:
        axes.set_xlim(right=1.3 * axes.get_xlim()[1])
    (legend,) = figure.legends
    handles = [*legend.legend_handles, Patch(facecolor=strip)]
    names = [text.get_text() for text in legend.get_texts()]
    legend.remove()
    figure.legend(
        [handle for handle in handles if handle],
        [*names, "strip: network sends, hidden\nor not (thin: with pauses)"],
        loc="outside right upper",
        frameon=False,
    )
    return figure
