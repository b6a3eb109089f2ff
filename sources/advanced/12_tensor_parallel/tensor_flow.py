"""What each rank of tensor parallelism holds on the way through a layer, and where ranks talk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import byte_unit, course_style, empty_figure, print_evidence

# How a tensor lies on a rank: what share of the box is filled, and how.
_HELD = {
    "whole": ("the whole tensor, on every rank", "#3f90da", ""),
    "passing": (
        "the same, gathered for one product",
        "#d3e6f8",
        "",
    ),
    "sequence": ("a part of the sequence", "#92dadd", ".."),
    "channels": ("some of its channels or heads", "#ffa90e", "//"),
    "partial": ("a term of a sum", "#c9c9c9", "xx"),
    "columns": ("its part of a matrix", "#832db6", ""),
    "rows": ("its part of a matrix", "#832db6", ""),
}
_READ = "Tensors: the sequence goes down, channels across. Matrices: rows go down, columns across."
MOST_RANKS = 64
_SENDS = {True: ("a collective", "#4d4d4d"), False: ("none in forward", "none")}
_BOX, _GAP, _BAR = 0.46, 0.24, 0.36


class Held(NamedTuple):
    """A tensor on the way, and how it lies.

    Attributes:
        name: of the tensor or matrix.
        how: "whole", "passing" (whole for a moment), "sequence", "channels" or "partial"; of a matrix
            "columns" or "rows".
        widths: how many times the hidden size it is wide.
    """

    name: str
    how: str
    widths: int = 1


class Exchange(NamedTuple):
    """A collective on the way: what it is in forward, and what its backward does."""

    name: str
    sends: bool = True


def draw_tensor_flow(
    schemes: Mapping[str, Sequence[Held | Exchange]], *, ranks: int = 4, title: str = ""
) -> Figure:
    """A band for each scheme, a row for each rank, from left to right what it holds.

    Args:
        schemes: by name, tensors and collectives in order.
        ranks: rows of a band.

    Raises:
        ValueError: nothing to draw, or a tensor that lies in an unknown way.
    """
    unknown = {s.how for way in schemes.values() for s in way if isinstance(s, Held)} - {*_HELD}
    if not schemes or not 2 <= ranks <= MOST_RANKS or unknown:
        raise ValueError(
            f"draw_tensor_flow() takes one scheme or more on 2 to {MOST_RANKS} ranks, and tensors that "
            f"lie in one of the ways {', '.join(_HELD)}; got {[*schemes]} on {ranks} ranks"
            f"{f', with {sorted(unknown)}' if unknown else ''}."
        )
    longest = max(_room(way) for way in schemes.values())
    with course_style():
        figure = Figure(figsize=(11, 1.2 + 2.5 * len(schemes)), layout="constrained")
        axes = figure.add_subplot()
        for band, (name, way) in enumerate(schemes.items()):
            _draw_band(axes, band * (ranks + 2.6), name, way, ranks)
        axes.set(xlim=(-1.6, longest), ylim=(len(schemes) * (ranks + 2.6) - 1.0, -0.9))
        axes.axis("off")
        axes.set_title(title)
        handles = _legend([step for way in schemes.values() for step in way])
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, title=_READ)
    return figure


def _legend(steps: Sequence[Held | Exchange]) -> list[Patch]:
    """What each look means, of those that are drawn."""
    used = {step.how for step in steps if isinstance(step, Held)}
    looks = [(how, look) for how, look in _HELD.items() if how in used]
    named = {
        text: Patch(
            facecolor=color, hatch=hatch, label=text, edgecolor="#555555",
            ls="--" if how == "passing" else "-", lw=0.8,
        )
        for how, (text, color, hatch) in looks
    }  # fmt: skip
    sends = {step.sends for step in steps if isinstance(step, Exchange)}
    bars = [look for sent, look in _SENDS.items() if sent in sends]
    return [
        *named.values(),
        *(Patch(facecolor=color, edgecolor="#4d4d4d", label=text) for text, color in bars),
    ]


def draw_feedforward() -> Figure:
    """A feed-forward layer on four ranks: tensor parallel, and with the sequence split as well."""
    split = [Held("A", "columns", 4), Held("Y = gelu(x A)", "channels", 4), Held("C", "rows")]
    before, term, after = "residual,\nnorm: x", Held("Y C", "partial"), "dropout,\nresidual: z"
    tensor = [
        *(Held(before, "whole"), Exchange("f: nothing\n(back: all-reduce,\n1.5 sbh)", sends=False)),
        *(*split, term, Exchange("g: all-reduce, 1.5 sbh\n(back: nothing)"), Held(after, "whole")),
    ]
    sequence = [
        Held(before, "sequence"),
        Exchange("all-gather, 0.75 sbh\n(back: once more, and a\nreduce-scatter, 0.75 sbh)"),
        *(Held("x", "passing"), *split, term),
        Exchange("reduce-scatter, 0.75 sbh\n(back: all-gather, 0.75 sbh)"),
        Held(after, "sequence"),
    ]
    return draw_tensor_flow(
        {"tensor\nparallel": tensor, "and sequence\nparallel": sequence},
        title="What each of four ranks holds in a feed-forward layer z = gelu(x A) C, forward,\n"
        "and how many numbers it sends around a ring (s positions, b sequences, h channels)",
    )


def _width(step: Held | Exchange) -> float:
    return _BAR if isinstance(step, Exchange) else _BOX * step.widths


def _room(way: Sequence[Held | Exchange]) -> float:
    return sum(_width(step) + _GAP for step in way)


def _draw_band(
    axes: Axes, top: float, name: str, way: Sequence[Held | Exchange], ranks: int
) -> None:
    axes.text(-1.55, top + ranks / 2, name, va="center", fontsize=11, wrap=True)
    for rank in range(ranks):
        axes.text(-0.08, top + rank + 0.45, f"rank {rank}", ha="right", va="center", fontsize=9)
    left = 0.0
    for step in way:
        middle = left + _width(step) / 2
        if isinstance(step, Exchange):
            filled = _SENDS[step.sends][1]
            spot = (middle - 0.07, top), 0.14, ranks - 0.1
            axes.add_patch(Rectangle(*spot, facecolor=filled, edgecolor="#4d4d4d", lw=1))
            below = {"ha": "center", "va": "top", "fontsize": 9, "style": "italic"}
            axes.text(middle, top + ranks + 0.05, step.name, **below)
        else:
            axes.text(middle, top - 0.1, step.name, ha="center", va="bottom", fontsize=9)
            for rank in range(ranks):
                _draw_box(axes, left, top + rank, step, rank, ranks)
        left += _width(step) + _GAP


def _draw_box(axes: Axes, left: float, top: float, held: Held, rank: int, ranks: int) -> None:
    height, width, (_, color, hatch) = 0.9, _width(held), _HELD[held.how]
    box = Rectangle((left, top), width, height, facecolor="#f4f4f4", edgecolor="#bbbbbb")
    axes.add_patch(box)
    spot = (left, top, width, height)
    if held.how in ("sequence", "rows"):
        spot = (left, top + height * rank / ranks, width, height / ranks)
    elif held.how in ("channels", "columns"):
        spot = (left + width * rank / ranks, top, width / ranks, height)
    line = "--" if held.how == "passing" else "-"
    look = {"facecolor": color, "hatch": hatch, "edgecolor": "#555555", "lw": 0.5, "ls": line}
    axes.add_patch(Rectangle(spot[:2], *spot[2:], **look))


def draw_kept(
    measured: Mapping[str, float],
    parts: Mapping[str, Mapping[str, float]],
    *,
    title: str = "",
    device: str = "",
) -> Figure:
    """Bytes that a rank keeps for backward: by the formula's terms, and measured, with its share of the first.

    Args:
        measured: by scheme.
        parts: by scheme, the terms and their bytes; the same terms for all, three at most.

    Raises:
        ValueError: the schemes of the two differ.
    """
    if not measured or [*measured] != [*parts]:
        raise ValueError(f"Both need the same schemes; got {[*measured]} and {[*parts]}.")
    unit, name = byte_unit(min(measured.values()))
    first = next(iter(measured.values()))
    with course_style():
        figure, axes = empty_figure(height=2.1 + 0.75 * len(measured))
        for row, (scheme, terms) in enumerate(parts.items()):
            _stack(axes, row - 0.18, {f"{k}, predicted": v / unit for k, v in terms.items()}, row)
            _stack(axes, row + 0.2, {"measured": measured[scheme] / unit}, row)
            told = f" {measured[scheme] / unit:.0f} {name}, {measured[scheme] / first:.0%}"
            axes.text(measured[scheme] / unit, row, told, va="center", fontsize=10)
        axes.set_yticks(range(len(measured)), list(measured))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(measured.values()) / unit)
        axes.set_xlabel(f"kept for backward on one rank ({name})")
        axes.grid(False, axis="y")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        print_evidence(figure, [Evidence.MEASURED, Evidence.PREDICTED], [device])
    return figure


def _stack(axes: Axes, middle: float, sizes: Mapping[str, float], row: int) -> None:
    """One bar of several terms; the first row names them."""
    looks = iter([("#3f90da", "\\\\"), ("#ffa90e", "//"), ("#832db6", "")])
    left = 0.0
    for term, size in sizes.items():
        color, hatch = ("#4d4d4d", "") if term == "measured" else next(looks)
        look: dict[str, Any] = {"facecolor": color, "hatch": hatch, "edgecolor": "#4d4d4d"}
        axes.barh(middle, size, left=left, height=0.32, lw=0.6, label="" if row else term, **look)
        left += size


__all__ = [
    "Exchange",
    "Held",
    "draw_feedforward",
    "draw_kept",
    "draw_tensor_flow",
]

check_public(globals())
