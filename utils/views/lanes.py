"""What happened when, in lanes beside each other: ranks, or compute beside communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence, wrapped

# Colour and hatch by order of first appearance; apart in grey as well.
_LOOKS = [("#92dadd", ""), ("#717581", ""), ("#ffa90e", "//"), ("#832db6", "xx"), ("#e6e6e6", "..")]

LONG_SECONDS = 2.0  # from here on the axis is in seconds


class Span(NamedTuple):
    """Something that went on from `start_seconds` to `end_seconds`; its kind has one colour."""

    kind: str
    start_seconds: float
    end_seconds: float


def draw_lanes(
    lanes: Mapping[str, Sequence[Span]],
    *,
    title: str,
    evidence: Evidence | None = Evidence.MEASURED,
    device: str = "",
) -> Figure:
    """Spans as bars over time, one row a lane; white is idle. Time starts with the first span.

    Evidence None is for a drawing of no run at all; its title must say so.

    Raises:
        ValueError: there is nothing to draw, more kinds than looks, or a span that ends before
            it starts.
    """
    spans = [span for lane in lanes.values() for span in lane]
    kinds = list(dict.fromkeys(span.kind for span in spans))
    _check(spans, kinds)
    start = min(span.start_seconds for span in spans)
    longest = max(span.end_seconds for span in spans) - start
    scale, unit = (1.0, "s") if longest >= LONG_SECONDS else (1e3, "ms")
    with course_style():
        figure, axes = empty_figure(height=1.9 + 0.55 * len(lanes))
        for row, lane in enumerate(lanes.values()):
            for span in lane:
                left, width = span.start_seconds - start, span.end_seconds - span.start_seconds
                color, hatch = _LOOKS[kinds.index(span.kind)]
                axes.barh(
                    row,
                    scale * width,
                    left=scale * left,
                    height=0.62,
                    color=color,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0.8,
                )
        axes.set_yticks(range(len(lanes)), [wrapped(name) for name in lanes])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel(f"time ({unit})")
        axes.set_title(title)
        looks = [_LOOKS[number] for number in range(len(kinds))]
        handles = [Patch(facecolor=c, hatch=h, edgecolor="white") for c, h in looks]
        figure.legend(handles, kinds, loc="outside right upper")
        print_evidence(figure, [evidence] if evidence else [], [device])
    return figure


def _check(spans: Sequence[Span], kinds: Sequence[str]) -> None:
    if not spans:
        raise ValueError("draw_lanes() needs a span or more; there is nothing to draw.")
    if len(kinds) > len(_LOOKS):
        raise ValueError(f"draw_lanes() tells {len(_LOOKS)} kinds apart; these are {len(kinds)}.")
    wrong = [span for span in spans if span.end_seconds < span.start_seconds]
    if wrong:
        raise ValueError(f"A span cannot end before it starts: {wrong[0]}.")
