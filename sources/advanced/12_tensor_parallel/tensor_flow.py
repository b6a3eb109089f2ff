"""What each rank of tensor parallelism holds on the way through a layer, and where ranks talk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.checked import check_public
from utils.units import Evidence, format_bytes
from utils.views.style import byte_unit, course_style, empty_figure, print_evidence

# How a tensor lies on a rank: what share of the box is filled, and how.
_HELD = {
    "whole": ("the whole tensor, on every rank", "#3f90da", ""),
    "sequence": ("a part of the sequence", "#92dadd", ".."),
    "channels": ("some of its channels or heads", "#ffa90e", "//"),
    "partial": ("a term of a sum", "#c9c9c9", "xx"),
}
MOST_RANKS = 64
_STEP, _BOX = 1.0, 0.72


class Held(NamedTuple):
    """A tensor on the way, and how it lies: "whole", "sequence", "channels" or "partial"."""

    name: str
    how: str


class Exchange(NamedTuple):
    """A collective on the way."""

    name: str


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
    longest = max(map(len, schemes.values()))
    with course_style():
        figure = Figure(figsize=(11, 0.8 + 2.3 * len(schemes)), layout="constrained")
        axes = figure.add_subplot()
        for band, (name, way) in enumerate(schemes.items()):
            _draw_band(axes, band * (ranks + 1.6), name, way, ranks)
        axes.set(xlim=(-1.9, longest * _STEP), ylim=(len(schemes) * (ranks + 1.6) - 0.6, -0.9))
        axes.axis("off")
        axes.set_title(title)
        handles = [Patch(facecolor=c, hatch=h, label=text) for text, c, h in _HELD.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    return figure


def draw_feedforward() -> Figure:
    """A feed-forward layer on four ranks: tensor parallel, and with the sequence split as well."""
    inside = [Held("x", "whole"), Held("Y = gelu(x A)", "channels"), Held("Y B", "partial")]
    tensor = [*inside, Exchange("all-reduce"), Held("sum", "whole"), Held("dropout, norm", "whole")]
    after = [Held("sum", "sequence"), Held("dropout, norm", "sequence")]
    sequence = [
        *(Held("x", "sequence"), Exchange("all-gather"), *inside),
        *(Exchange("reduce-scatter"), *after),
    ]
    return draw_tensor_flow(
        {"tensor\nparallel": tensor, "and sequence\nparallel": sequence},
        title="A feed-forward layer on four ranks, forward, from left to right",
    )


def _draw_band(
    axes: Axes, top: float, name: str, way: Sequence[Held | Exchange], ranks: int
) -> None:
    axes.text(-1.85, top + ranks / 2, name, va="center", fontsize=11, wrap=True)
    for rank in range(ranks):
        axes.text(-0.08, top + rank + 0.45, f"rank {rank}", ha="right", va="center", fontsize=9)
    for place, step in enumerate(way):
        left = place * _STEP
        if isinstance(step, Exchange):
            middle = left + _BOX / 2
            axes.add_patch(Rectangle((middle - 0.09, top), 0.18, ranks - 0.1, color="#4d4d4d"))
            axes.text(
                middle, top - 0.1, step.name, ha="center", va="bottom", fontsize=9, style="italic"
            )
            continue
        axes.text(left + _BOX / 2, top - 0.1, step.name, ha="center", va="bottom", fontsize=9)
        for rank in range(ranks):
            _draw_box(axes, left, top + rank, step.how, rank, ranks)


def _draw_box(axes: Axes, left: float, top: float, how: str, rank: int, ranks: int) -> None:
    height, (_, color, hatch) = 0.9, _HELD[how]
    axes.add_patch(Rectangle((left, top), _BOX, height, facecolor="#f4f4f4", edgecolor="#bbbbbb"))
    spot = {
        "sequence": (left, top + height * rank / ranks, _BOX, height / ranks),
        "channels": (left + _BOX * rank / ranks, top, _BOX / ranks, height),
    }.get(how, (left, top, _BOX, height))
    axes.add_patch(
        Rectangle(spot[:2], *spot[2:], facecolor=color, hatch=hatch, edgecolor="#777777", lw=0.5)
    )


def draw_kept(
    measured: Mapping[str, float],
    parts: Mapping[str, Mapping[str, float]],
    *,
    title: str = "",
    device: str = "",
) -> Figure:
    """Bytes that a rank keeps for backward: by the formula's terms, and measured.

    Args:
        measured: by scheme.
        parts: by scheme, the terms of the formula and their bytes; the same terms for all.

    Raises:
        ValueError: the schemes of the two differ.
    """
    if not measured or [*measured] != [*parts]:
        raise ValueError(f"Both need the same schemes; got {[*measured]} and {[*parts]}.")
    unit, name = byte_unit(max(measured.values()))
    looks = [("#bd1f01", "\\\\"), ("#92dadd", ".."), ("#ffa90e", "//"), ("#e6e6e6", "")]
    with course_style():
        figure, axes = empty_figure(height=1.6 + 0.75 * len(measured))
        for row, (scheme, terms) in enumerate(parts.items()):
            left = 0.0
            for (term, size), (color, hatch) in zip(terms.items(), looks, strict=False):
                axes.barh(
                    row - 0.18,
                    size / unit,
                    left=left,
                    height=0.34,
                    color=color,
                    hatch=hatch,
                    edgecolor="white",
                    label=term if not row else "",
                )
                left += size / unit
            axes.barh(
                row + 0.2,
                measured[scheme] / unit,
                height=0.28,
                color="#4d4d4d",
                label="" if row else "measured",
            )
            text = f"{format_bytes(measured[scheme])}"
            axes.text(max(left, measured[scheme] / unit), row, f" {text}", va="center", fontsize=10)
        axes.set_yticks(range(len(measured)), list(measured))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.16 * max(measured.values()) / unit)
        axes.set_xlabel(f"kept for backward on one rank ({name})")
        axes.grid(False, axis="y")
        axes.set_title(title)
        axes.legend(loc="lower right", fontsize=9)
        print_evidence(figure, [Evidence.MEASURED, Evidence.PREDICTED], [device])
    return figure


__all__ = ["Exchange", "Held", "draw_feedforward", "draw_kept", "draw_tensor_flow"]

check_public(globals())
