"""Who holds what, and bytes on one rank over the number of ranks: by a formula, and as a step takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.catalog import device
from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.units import GB, Category, Evidence
from utils.views.style import LOOKS, course_style, empty_figure, print_evidence

from .holders import draw_holders

_SHARDED = {
    "DDP": (),
    "ZeRO-1": ("optimizer state",),
    "ZeRO-2": ("optimizer state", "gradients"),
    "ZeRO-3": ("optimizer state", "gradients", "parameters"),
}
_SENT = {
    "DDP": "all-reduce gradients",
    "ZeRO-1": "reduce-scatter gradients,\ngather parameters once",
    "ZeRO-2": "the same, gradients\nbucket by bucket",
    "ZeRO-3": "gather each block twice, whole for\na moment; reduce-scatter gradients",
}
_THINNEST = 1 / 200  # of the highest bar: less is no part that a reader sees
_MOST_SCHEMES, _GAP = 8, 1.0  # bars around one number of ranks; and between two, in bars


def draw_who_holds() -> Figure:
    """Four ranks in four schemes, by the textbook: what each holds, and what it sends."""
    title = "Who holds and sends what by the ZeRO paper, between backward and step; areas are bytes"
    figure = draw_holders(_SHARDED, sends=_SENT, title=title)
    print_evidence(
        figure, [Evidence.PREDICTED], ["16 bytes a parameter, mixed precision with Adam"]
    )
    return figure


def draw_staircase(
    peaks: Mapping[str, Mapping[int, Measurement]],
    predicted_bytes: Mapping[str, Mapping[int, float]],
    *,
    limits: Sequence[str] = (),
    title: str = "",
) -> Figure:
    """Peaks of one rank as stacked bars by category, grouped by the number of ranks.

    A diamond on a bar is what the formula says of its states.

    Args:
        peaks: by strategy, a step's measurement by the number of ranks; at most eight strategies.
        predicted_bytes: by strategy, bytes of states by the number of ranks.
        limits: cards, such as "A100-40GB"; a line stands where PyTorch says that a card ends.

    Raises:
        ValueError: nothing to draw, more than eight strategies, or no such card.
    """
    if not any(peaks.values()) or len(peaks) > _MOST_SCHEMES:
        raise ValueError(f"A staircase shows 1 to {_MOST_SCHEMES} strategies; got {len(peaks)}.")
    counts = sorted({ranks for found in peaks.values() for ranks in found})
    shown = [(n, name, found[n]) for n in counts for name, found in peaks.items() if n in found]
    places = [at + _GAP * counts.index(ranks) for at, (ranks, _, _) in enumerate(shown)]
    with course_style():
        figure, axes = empty_figure(width=10, height=5)
        for place, (ranks, name, run) in zip(places, shown, strict=True):
            _draw_bar(axes, place, run)
            if ranks in (known := predicted_bytes.get(name, {})):
                axes.plot(place, known[ranks] / GB, "D", color="black", mec="white", ms=7, zorder=4)
        for limit in limits:
            size = device(limit).memory_bytes / GB
            axes.axhline(size, color="black", ls=":", lw=1.3)
            beside = axes.get_yaxis_transform()  # to the right of the frame
            says = f"{limit}\nshows {size:.1f} GB"
            axes.text(1.01, size, says, transform=beside, va="center", fontsize=9)
        axes.set_xticks(
            places,
            [f"{name}\n{ranks} rank{'s' * (ranks > 1)}" for ranks, name, _ in shown],
            fontsize=9,
        )
        axes.set_ylabel("peak of one rank (GB)")
        axes.grid(False, axis="x")
        axes.set_title(title)
        _draw_legend(figure, [run for _, _, run in shown], diamonds=bool(predicted_bytes))
        evidence = [*(run.evidence for _, _, run in shown), Evidence.PREDICTED]
        print_evidence(figure, evidence, [run.device for _, _, run in shown])
    return figure


def _draw_bar(axes: Axes, place: float, run: Measurement) -> None:
    foot = 0.0
    for category in run.breakdown:
        height, look = run.breakdown[category] / GB, LOOKS[category]
        axes.bar(place, height, bottom=foot, width=0.8, color=look.color, hatch=look.hatch)
        foot += height
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "lw": 0}  # a card's line may pass
    axes.text(place, foot + 0.3, f"{foot:.1f}", ha="center", va="bottom", fontsize=10, bbox=box)


def _draw_legend(figure: Figure, runs: Sequence[Measurement], *, diamonds: bool) -> None:
    most = max(run.peak_bytes for run in runs)
    there = [c for c in Category if any(run.breakdown[c] > _THINNEST * most for run in runs)]
    handles: list[Artist] = [
        Patch(facecolor=LOOKS[c].color, hatch=LOOKS[c].hatch, label=str(c)) for c in there
    ]
    if diamonds:
        handles.append(
            Line2D(
                [], [], marker="D", color="black", mec="white", ls="", label="states by the formula"
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=10)


__all__ = ["draw_staircase", "draw_who_holds"]

check_public(globals())
