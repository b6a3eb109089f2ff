"""Pictures of lesson 18: peaks over the length, and who works and who waits around a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .rounds import round_ends

__all__ = ["draw_growth", "draw_rounds"]

# Colour, marker and line of each curve: they differ in grey, too.
_LOOKS = [
    ("#bd1f01", "s", "-"),
    ("#e76300", "v", "--"),
    ("#b9ac70", "^", "-."),
    ("#832db6", "D", "-"),
    ("#3f90da", "o", "--"),
    ("#4d4d4d", "P", "-"),
]


def draw_growth(
    peaks: Mapping[str, Mapping[int, int]],
    reserved: Mapping[str, Mapping[int, int]],
    *,
    room_bytes: int,
    above: float,
    told_at: int,
    title: str,
    device: str,
) -> Figure:
    """Peaks over the length of the sequence, both in powers of two, and what a GPU has.

    Args:
        peaks: by curve, bytes by tokens.
        reserved: the same, as the caching allocator reserves them.
        room_bytes: of the GPU.
        above: how far a band reaches over the reserved bytes of each curve that can fit, as a part of them.
        told_at: the length at which the peaks are written out.
        title, device: what stands above, and whose numbers they are.
    """
    with course_style():
        figure, axes = empty_figure(9.5, 5.4)
        lengths = sorted({n for curve in peaks.values() for n in curve})
        if len(lengths) < 2:
            raise ValueError("peaks needs curves of two lengths or more.")
        for (name, curve), (color, marker, line) in zip(peaks.items(), _LOOKS, strict=False):
            heights = [curve[n] / GIB for n in lengths]
            axes.plot(lengths, heights, color=color, marker=marker, ls=line, label=name)
            if curve[told_at] < 2 * room_bytes:
                tops = [reserved[name][n] / GIB * (1 + above) for n in lengths]
                axes.fill_between(lengths, heights, tops, color=color, alpha=0.25, lw=0)
            below = curve[told_at] < room_bytes
            digits = 1 if curve[told_at] < 2 * room_bytes else 0
            axes.annotate(f"{curve[told_at] / GIB:.{digits}f}", (told_at, curve[told_at] / GIB),
                          (6, -13 if below else -4), textcoords="offset points", fontsize=10)  # fmt: skip
        room = room_bytes / GIB
        axes.axhline(room, color="black", lw=1, ls=":")
        axes.text(1.12 * lengths[-1], room, f"{room:.0f} GiB:\nthe GPU", va="center", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [_tokens(n) for n in lengths])
        ticks = [2**power for power in range(4, 11)]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlim(0.8 * lengths[0], 2.1 * lengths[-1])
        axes.set_ylim(15, 1300)
        about = "tokens of the sequence (one a GPU; over a ring one in all)"
        axes.set(xlabel=about, ylabel="peak of one rank (GiB)", title=title)
        handles, names = axes.get_legend_handles_labels()
        order = sorted(range(len(names)), key=lambda i: -peaks[names[i]][lengths[-1]])
        shown = [handles[i] for i in order] + [Patch(color="#888888", alpha=0.4)]
        axes.legend(
            shown,
            [*(names[i] for i in order), f"to reserved + {above:.0%}"],
            fontsize=10,
        )
        print_evidence(figure, [Evidence.SIMULATED], [device])
    return figure


def _tokens(count: int) -> str:
    return f"{count // 2**20}M" if count >= 2**20 else f"{count // 1024}k"


def draw_rounds(pairs: Mapping[str, Sequence[Sequence[int]]], *, piece: int, title: str) -> Figure:
    """For each layout a band, for each rank a row: how much it computes in each round, and how long it waits.

    A round lasts as long as its busiest rank computes.

    Args:
        pairs: by layout and rank, pairs of query and key of each round.
        piece: tokens of a piece; pieces squared are the unit.
        title: what stands above.
    """
    with course_style():
        figure, axes = empty_figure(9.5, 1.4 + 1.5 * len(pairs))
        rows, names, latest, square = 0.0, [], 0.0, piece**2
        for layout, ranks in pairs.items():
            ends = [end / square for end in round_ends(ranks)]
            begins = [0.0, *ends[:-1]]
            latest = max(latest, ends[-1])
            for rank, of_rank in enumerate(ranks):
                axes.barh(
                    rows, ends[-1], height=0.8, color="#eeeeee", edgecolor="#bbbbbb", hatch=".."
                )
                for turn, (begin, work) in enumerate(zip(begins, of_rank, strict=True)):
                    if work:
                        _draw_work(axes, rows, begin, work / square, (rank - turn) % len(ranks))
                names.append((rows, f"{layout}, rank {rank}"))
                rows += 1
            last = rows - 0.5
            axes.vlines(ends, last - len(ranks), last, color="black", ls="--", lw=1)
            rows += 0.6
        axes.set_yticks([row for row, _ in names], [name for _, name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02 * latest)
        axes.grid(False, axis="y")
        about = f"work, in squares of the picture above ({piece} queries by {piece} keys)"
        axes.set(xlabel=about, title=title)
        shown = [Patch(color="#3f90da", label="attention to the keys of a rank"),
                 Patch(facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="..", label="waits"),
                 Line2D([], [], color="black", ls="--", lw=1, label="a round ends")]  # fmt: skip
        figure.legend(handles=shown, loc="outside lower left", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _draw_work(axes: Axes, row: float, begin: float, work: float, source: int) -> None:
    axes.barh(row, work, left=begin, height=0.8, color="#3f90da", edgecolor="white")
    axes.text(begin + work / 2, row, f"keys {source}", ha="center", va="center", fontsize=10, color="white")  # fmt: skip


check_public(globals())
