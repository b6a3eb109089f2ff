"""Steps of a slow job as lanes: every backward pass that all-reduces ends with its own all-reduce."""

from __future__ import annotations

from collections.abc import Mapping

from utils.labs.slow_jobs import SlowJob
from utils.views.lanes import Span

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
