"""Who holds what while a ring adds up: a grid a step, replayed from the messages that were counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

from .wire import Message

SHADES = ("#f2f6fa", "#c3d8ea", "#6ea6cf", "#1170aa")  # of how far a sum has come
ACROSS = 4
Held = list[list[frozenset[int]]]  # [rank][part]: whose numbers are added up there


def held_by_step(messages: Sequence[Message], ranks: int) -> list[Held]:
    """Before the first step and after each: whose numbers each rank has in each of `ranks` parts.

    Raises:
        ValueError: no message, or one of a rank or a part that is not there.
    """
    _refuse_strangers(messages, ranks)
    part_bytes = max(1, *(m.bytes for m in messages))
    found: list[Held] = [[[frozenset({rank})] * ranks for rank in range(ranks)]]
    for step in range(1, max(m.step for m in messages) + 1):
        before = found[-1]
        after = [list(row) for row in before]
        for m in messages:
            if m.step == step:
                part = m.at_byte // part_bytes
                after[m.target][part] = before[m.target][part] | before[m.source][part]
        found.append(after)
    return found


def _refuse_strangers(messages: Sequence[Message], ranks: int) -> None:
    if not messages:
        raise ValueError(
            "messages is empty: give those of one all-reduce, as `run_hosts` counted them."
        )
    part_bytes = max(1, *(m.bytes for m in messages))
    for m in messages:
        if not (
            0 <= m.source < ranks and 0 <= m.target < ranks and 0 <= m.at_byte // part_bytes < ranks
        ):
            raise ValueError(f"{m} is of a rank or a part beyond ranks={ranks}.")


def draw_ring_parts(messages: Sequence[Message], *, title: str) -> Figure:
    """The ring, then a grid for the start and each step: row = rank, column = part.

    The number in a square says of how many ranks it holds the sum; what just came in is framed.
    """
    ranks = 1 + max((max(m.source, m.target) for m in messages), default=0)
    states = held_by_step(messages, ranks)
    down = -(-(len(states) + 1) // ACROSS)
    with course_style():
        figure = Figure(figsize=(9.2, 2.75 * down + 0.9), layout="constrained")
        panels = list(np.atleast_1d(figure.subplots(down, ACROSS, squeeze=False)).flatten())
        _draw_circle(panels[0], {(m.source, m.target) for m in messages}, ranks)
        for step, (axes, held) in enumerate(zip(panels[1:], states, strict=False)):
            came = [m for m in messages if m.step == step]
            _draw_state(axes, held, came, ranks)
            axes.set_title(_name(step, ranks), fontsize=10, loc="center")
        for axes in panels[len(states) + 1 :]:
            axes.set_axis_off()
        figure.suptitle(
            f"{title}\nnumber: ranks added up in that part; framed: just received",
            x=0.01,
            ha="left",
            fontsize=12,
        )
        print_evidence(figure, [Evidence.MEASURED], ["real ranks"])
    return figure


def _name(step: int, ranks: int) -> str:
    if step == 0:
        return "start"
    return f"step {step}: {'add' if step < ranks else 'copy'}"


def _draw_state(axes: Axes, held: Held, came: Sequence[Message], ranks: int) -> None:
    part_bytes = max((m.bytes for m in came), default=1)
    for rank, row in enumerate(held):
        for part, whose in enumerate(row):
            share = (len(whose) - 1) / max(1, ranks - 1)
            shade = SHADES[round(share * (len(SHADES) - 1))]
            axes.add_patch(_square(part, rank, facecolor=shade, edgecolor="#b0b0b0", lw=0.5))
            color = "white" if len(whose) == ranks else "black"
            style = {"ha": "center", "va": "center", "fontsize": 9}
            axes.text(part, rank, str(len(whose)), color=color, **style)
    for m in came:
        frame = _square(m.at_byte // part_bytes, m.target, fill=False, edgecolor="black", lw=2)
        axes.add_patch(frame)
    axes.set_xlim(-0.6, ranks - 0.4)
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.tick_params(labelsize=9, length=0, pad=1)
    axes.set_xlabel("part", fontsize=9)
    axes.set_ylabel("rank", fontsize=9)
    for side in axes.spines.values():
        side.set_visible(False)


def _square(x: float, y: float, **looks: object) -> Rectangle:
    return Rectangle((x - 0.5, y - 0.5), 1, 1, **looks)  # type: ignore[arg-type]


def _draw_circle(axes: Axes, pairs: set[tuple[int, int]], ranks: int) -> None:
    angles = [np.pi / 2 - 2 * np.pi * rank / ranks for rank in range(ranks)]
    places = [(float(np.cos(a)), float(np.sin(a))) for a in angles]
    for source, target in sorted(pairs):
        arrow = FancyArrowPatch(
            places[source],
            places[target],
            connectionstyle="arc3,rad=-0.25",
            arrowstyle="-|>",
            mutation_scale=14,
            shrinkA=14,
            shrinkB=14,
            color="black",
        )
        axes.add_patch(arrow)
    for rank, place in enumerate(places):
        axes.add_patch(Circle(place, 0.27, facecolor=SHADES[1], edgecolor="black"))
        axes.text(*place, str(rank), ha="center", va="center", fontsize=10)
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.5, 1.5)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title("who sends to whom", fontsize=10, loc="center")


__all__ = ["draw_ring_parts", "held_by_step"]

check_public(globals())
