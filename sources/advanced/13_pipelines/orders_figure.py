"""Schedules over time, with what their last rank waits for written where it waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.planner.schedules import in_flight
from utils.units import Evidence
from utils.views import Panel
from utils.views.schedule import BACKWARD, FORWARD, IDLE, LATER_CHUNK, LOOKS, NAMES, draw_program
from utils.views.style import course_style, print_evidence

__all__ = ["draw_orders"]

CHARACTER = 0.0058  # of the axis, that a note takes for each of its characters


def draw_orders(panels: Mapping[str, Panel], *, title: str, unit: str) -> Figure:
    """Schedules below each other on one axis of time.

    The heading of one that was predicted says how long a rank idles beside its work and in the
    whole step, and how many micro-batches each rank holds. On it the waits of the last rank are
    marked, before its first action and after its last, where they have room.

    Args:
        panels: what ran, by name, from top to bottom.
        title: of the figure.
        unit: of the times.
    """
    longest = max(panel.result.total for panel in panels.values())
    with course_style():
        sizes = [len(panel.rows) for panel in panels.values()]
        figure = Figure(
            figsize=(11, 1.1 + sum(0.72 + 0.29 * n for n in sizes)), layout="constrained"
        )
        every = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
        for axes, (name, panel) in zip(every, panels.items(), strict=True):
            draw_program(axes, panel.rows, panel.result, longest, first=0)
            axes.set_title(_heading(name, panel), fontsize=10)
            axes.set_ylabel("rank")
            if panel.evidence is Evidence.PREDICTED:
                _mark_waits(axes, panel, longest)
        every[-1].set_xlabel(unit)
        handles, labels = _legend(panels)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=3,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        )  # fmt: skip
        figure.suptitle(title, fontsize=12)
        print_evidence(figure, {panel.evidence for panel in panels.values()})
    return figure


def _chunks(panel: Panel) -> int:
    """Stages on each rank."""
    return 1 + max(action.stage for row in panel.rows for action in row) // len(panel.rows)


def _heading(name: str, panel: Panel) -> str:
    ratio = panel.result.bubble_ratio
    if panel.evidence is not Evidence.PREDICTED:
        return f"{name} ({panel.evidence})"  # its passes stretch: what it idles is no share of the given work
    text = f"{name} ({panel.evidence}): idle {ratio:.1%} of the work, {ratio / (1 + ratio):.1%} of the step"
    held = ", ".join(f"{in_flight(row) / _chunks(panel):g}" for row in panel.rows)
    return f"{text}; in flight on ranks 0 to {len(panel.rows) - 1}: {held}"


def _mark_waits(axes: Axes, panel: Panel, longest: float) -> None:
    """Write on the last rank's first and last wait what it lasts."""
    last, run, chunks = len(panel.rows) - 1, panel.result, _chunks(panel)
    before, after = run.starts[-1][0], run.total - run.ends[-1][-1]
    passes = f"{last} x 1/{chunks} " if chunks > 1 else f"{last} "
    waits = [(0.0, before, f"{passes}forwards"), (run.total - after, after, f"{passes}backwards")]
    for start, width, text in waits:
        if width < CHARACTER * len(text) * longest:
            continue
        middle = start + width / 2
        axes.annotate(
            "",
            (start, last + 0.3),
            (start + width, last + 0.3),
            arrowprops={"arrowstyle": "<->"},
            zorder=4,
        )
        axes.text(middle, last - 0.1, text, ha="center", va="center", fontsize=8, zorder=4)


def _legend(panels: Mapping[str, Panel]) -> tuple[list[Any], list[str]]:
    """Handles and labels; `I` has the look of `B`, so both share one."""
    kinds = {a.kind for panel in panels.values() for row in panel.rows for a in row}
    found: list[tuple[Any, str]] = [  # matplotlib's types know no tuple of handles
        (Patch(facecolor=FORWARD), NAMES["F"]),
        (Patch(facecolor=BACKWARD), f"{NAMES['B']}; of ZB-H1, {NAMES['I']}" if kinds >= {"B", "I"}
         else NAMES["I" if "I" in kinds else "B"]),
    ]  # fmt: skip
    if "W" in kinds:
        color, hatch = LOOKS["W"]
        found.append((Patch(facecolor=color, hatch=hatch, edgecolor="white"), NAMES["W"]))
    if any(_chunks(panel) > 1 for panel in panels.values()):
        pale = tuple(Patch(facecolor=color, alpha=LATER_CHUNK) for color in (FORWARD, BACKWARD))
        found.append((pale, "pale: the rank's second chunk"))
    found.append((Patch(facecolor=IDLE), "idle: the bubble"))
    found.append((Patch(facecolor="none"), "number: micro-batch"))
    return [handle for handle, _ in found], [label for _, label in found]


check_public(globals())
