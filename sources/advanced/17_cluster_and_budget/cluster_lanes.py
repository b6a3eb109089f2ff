"""Which job ran on which node of a cluster, and when; and what waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import Evidence
from utils.views.lanes import Span, draw_lanes

from .clusters.jobs import JobSpan

WAITING = "in the queue"
DEAD = "node is dead"


def draw_cluster(
    history: Sequence[JobSpan],
    nodes: Sequence[str],
    *,
    title: str,
    killed: Mapping[str, float] | None = None,
    evidence: Evidence = Evidence.MEASURED,
    device: str = "",
) -> Figure:
    """One lane a node, and one for jobs that wait.

    Args:
        history: what was seen of the jobs.
        nodes: in order.
        title: of the figure.
        killed: nodes that died, and when, on the clock of the history.
        evidence: measured, or recorded.
        device: on which machine.

    Raises:
        ValueError: nothing ran.
    """
    ran = [span.end_seconds for span in history if span.state in ("RUNNING", "PENDING")]
    if not ran:
        raise ValueError("draw_cluster: history holds no job that ran or waited; nothing to draw.")
    lanes: dict[str, list[Span]] = {name: [] for name in (*nodes, "queue")}
    ends = max(ran)
    for span in history:
        start, end = span.start_seconds, max(span.end_seconds, span.start_seconds + 0.01 * ends)
        if span.state == "RUNNING":
            for name in span.node_names:
                gone = (killed or {}).get(name, end)
                lanes[name].append(
                    Span(_kind(span), start, end if gone < start else min(end, gone))
                )
        elif span.state == "PENDING":
            lanes["queue"].append(Span(WAITING, start, end))
    for name, when in (killed or {}).items():
        lanes[name].append(Span(DEAD, when, ends))
    return draw_lanes(lanes, title=title, evidence=evidence, device=device)


def _kind(span: JobSpan) -> str:
    return f"{span.name}, started again" if span.restarts else span.name


__all__ = ["draw_cluster"]

check_public(globals())
