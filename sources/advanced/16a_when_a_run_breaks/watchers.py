"""Who watches whom under torchrun: agents, ranks, the store where agents meet, the checkpoint."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from utils.checked import check_public
from utils.views.style import course_style

_AGENT, _RANK, _STORE = "#dcebf8", "#f5efd6", "#e8d9f2"
_FAULT = "#8c1500"
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.9}


def draw_watchers(*, title: str) -> Figure:
    """Two hosts, an agent and a rank on each; arrows say what each tells the other, and how often."""
    with course_style():
        figure = Figure(figsize=(9.4, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for left, name in ((0, "host 0"), (58, "host 1")):
            axes.add_patch(Rectangle((left, 16), 42, 40, facecolor="#fafafa", edgecolor="#717581"))
            axes.text(left + 1.5, 52.5, name, fontsize=12, fontweight="bold")
        _box(axes, 3, 42, "agent 0\n(torchrun)", _AGENT)
        _box(axes, 23, 42, "rendezvous\n(a store)", _STORE)
        _box(axes, 79, 42, "agent 1\n(torchrun)", _AGENT)
        _box(axes, 3, 20, "rank 0", _RANK)
        _box(axes, 79, 20, "rank 1", _RANK)
        _box(axes, 41, 2, "checkpoint,\nshared storage", _STORE, width=18)
        _arrow(axes, (19, 46), (23, 46))
        _arrow(axes, (79, 46), (39, 46), "signs of life;\n3 missed: dead", (50, 47.5))
        _arrow(axes, (11, 42), (11, 28), "starts it,\nlooks 10 times\na second", (12, 32), "left")
        _arrow(axes, (87, 42), (87, 28), "starts it,\nlooks 10 times\na second", (86, 32), "right")
        _arrow(axes, (19, 24), (79, 24), "gradients over TCP", (50, 25), both=True)
        dead = "a dead process: its kernel closes the connection\na cut link: silence until the timeout"
        axes.text(50, 22.5, dead, ha="center", va="top", fontsize=9.5, color=_FAULT, bbox=_WHITE)
        _arrow(axes, (11, 20), (41, 6), "saves, loads", (20, 8))
        _arrow(axes, (59, 6), (87, 20), "loads", (78, 8))
        axes.set(xlim=(-1, 101), ylim=(0, 57))
        axes.axis("off")
        axes.set_title(title)
    return figure


def _box(axes: Axes, left: float, low: float, text: str, color: str, width: float = 16) -> None:
    style = "round,pad=0,rounding_size=1.2"
    axes.add_patch(
        FancyBboxPatch((left, low), width, 8, style, facecolor=color, edgecolor="#4d4d4d")
    )
    axes.text(left + width / 2, low + 4, text, ha="center", va="center", fontsize=10.5)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    at: tuple[float, float] = (0.0, 0.0),
    align: str = "center",
    both: bool = False,
) -> None:
    look = {"arrowstyle": "<|-|>" if both else "-|>", "color": "#4d4d4d", "lw": 1.4}
    axes.annotate("", end, start, arrowprops=look)
    if text:
        axes.text(*at, text, ha=align, va="bottom", fontsize=9.5, bbox=_WHITE)


__all__ = ["draw_watchers"]

check_public(globals())
