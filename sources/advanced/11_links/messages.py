"""Who sends what to whom, step by step: one small grid a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.units import Evidence, format_bytes
from utils.views.style import course_style, print_evidence

from .wire import Message

MOST_STEPS = 16
MOST_NAMED = 12  # ranks whose numbers have room in a grid
FULL, SOME = "#1170aa", "#92dadd"


def draw_messages(
    messages: Sequence[Message], *, title: str, across: int = 7, hosts: int = 1
) -> Figure:
    """A grid a step: row = who sends, column = who receives, number = which part of the tensor.

    Args:
        messages: as `utils.lessons.lesson_11.wire.messages` gives them.
        title: of the figure.
        across: grids in a row.
        hosts: lines part the ranks of hosts, in equal blocks.

    Raises:
        ValueError: no messages, or more steps than there is room for.
    """
    steps = max((message.step for message in messages), default=0)
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"draw_messages() draws 1 to {MOST_STEPS} steps; these are {steps}.")
    ranks = 1 + max(max(m.source, m.target) for m in messages)
    largest = max(m.bytes for m in messages)
    across = min(across, steps)
    down = -(-steps // across)
    with course_style():
        figure = Figure(figsize=(1.42 * across + 0.9, 1.72 * down + 0.95), layout="constrained")
        grids = np.atleast_1d(figure.subplots(down, across, squeeze=False)).flatten()
        for step, axes in enumerate(grids, start=1):
            if step > steps:
                axes.set_axis_off()
                continue
            _draw_grid(axes, [m for m in messages if m.step == step], ranks, largest, hosts)
            if _has_parts(messages):
                _number(axes, [m for m in messages if m.step == step], largest)
            axes.set_title(f"step {step}", fontsize=10, loc="center")
            if (step - 1) % across == 0:
                axes.set_ylabel("sender", fontsize=9)
        figure.suptitle(f"{title}\n{_legend(messages)}", x=0.01, ha="left", fontsize=12)
        print_evidence(figure, [Evidence.MEASURED], ["real ranks"])
    return figure


def _legend(messages: Sequence[Message]) -> str:
    sizes = [format_bytes(size) for size in sorted({m.bytes for m in messages}, reverse=True)]
    each = f"{sizes[0]} a message" if len(sizes) == 1 else f"dark {sizes[0]}, light {sizes[1]}"
    each += " or less" if len(sizes) > 2 else ""
    what = "number: part of the tensor; " if _has_parts(messages) else ""
    return f"row: sender, column: receiver; {what}{each}"


def _has_parts(messages: Sequence[Message]) -> bool:
    return any(m.at_byte for m in messages)


def _draw_grid(
    axes: Axes, messages: Sequence[Message], ranks: int, largest: int, hosts: int
) -> None:
    for m in messages:
        color = FULL if m.bytes == largest else SOME
        axes.add_patch(_square(m.target, m.source, color))
    axes.set_xlim(-0.5, ranks - 0.5)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_aspect("equal")
    every = 1 if ranks <= MOST_NAMED else 4
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(0, ranks, every), [str(rank) for rank in range(0, ranks, every)])
        axis.set_tick_params(labelsize=7, length=0, pad=1)
    axes.set_xticks(np.arange(0.5, ranks - 1), minor=True)
    axes.set_yticks(np.arange(0.5, ranks - 1), minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", color="#d9d9d9", lw=0.5)
    axes.tick_params(which="minor", length=0)
    for host in range(1, hosts):
        edge = host * ranks / hosts - 0.5
        axes.axhline(edge, color="black", lw=1.2)
        axes.axvline(edge, color="black", lw=1.2)


def _number(axes: Axes, messages: Sequence[Message], largest: int) -> None:
    """Which part it is, counted in parts of the message's own size."""
    for m in messages:
        text = "white" if m.bytes == largest else "black"
        axes.text(
            m.target,
            m.source,
            str(m.at_byte // max(1, m.bytes)),
            ha="center",
            va="center",
            fontsize=7,
            color=text,
        )


def _square(x: float, y: float, color: str) -> Rectangle:
    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white", lw=0.5)


__all__ = ["draw_messages"]

check_public(globals())
