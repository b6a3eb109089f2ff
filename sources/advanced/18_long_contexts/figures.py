"""Pictures of lesson 18: bytes over the length, who works and who waits around a ring, what hides behind what."""

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

__all__ = ["draw_growth", "draw_rounds", "draw_steps"]

# Colour, marker and line of each curve: they differ in grey, too.
_LOOKS = [
    ("#832db6", "D", "-"),
    ("#3f90da", "o", "--"),
    ("#3b7a3b", "*", "-."),
    ("#4d4d4d", "P", "-"),
    ("#a96b59", "X", ":"),
]


def draw_growth(
    reserved: Mapping[str, Mapping[int, int]],
    *,
    room_bytes: int,
    above: float,
    told: Mapping[str, tuple[str | int, ...]],
    title: str,
    device: str,
) -> Figure:
    """What steps reserve, with a margin, over the length of the sequence, both in powers of two, and what a GPU has.

    Args:
        reserved: by curve, bytes by tokens.
        room_bytes: of the GPU.
        above: the margin, as a part of the reserved bytes.
        told: by curve, "above" or "below", and the lengths at which its height is written there.
        title, device: what stands above, and whose numbers they are.
    """
    with course_style():
        figure, axes = empty_figure(9.5, 6.0)
        lengths = sorted({n for curve in reserved.values() for n in curve})
        if len(lengths) < 2:
            raise ValueError("reserved needs curves of two lengths or more.")
        room = room_bytes / GIB
        top = 1.25 * (1 + above) * max(max(curve.values()) for curve in reserved.values()) / GIB
        axes.axhspan(room, top, color="#eeeeee", zorder=0)
        axes.axhline(room, color="black", lw=1, ls=":")
        for place, (name, curve) in enumerate(reserved.items()):
            color, marker, line = _LOOKS[place]
            heights = {n: (1 + above) * curve[n] / GIB for n in lengths}
            axes.plot(lengths, list(heights.values()), color=color, marker=marker, ls=line, label=name)  # fmt: skip
            side, *places = told[name]
            _tell(axes, {n: heights[n] for n in places}, below=side == "below")  # pyright: ignore[reportArgumentType]
        about = f"{room:.0f} GiB: the GPU.\nAbove, a step\ndoes not fit"
        axes.text(1.15 * lengths[-1], room, about, va="bottom", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [_tokens(n) for n in lengths])
        ticks = [2**power for power in range(4, 12)]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlim(0.8 * lengths[0], 2.9 * lengths[-1])
        axes.set_ylim(20, top)
        about = "tokens of a sequence (one on each GPU, or one around a ring)"
        axes.set(xlabel=about, ylabel=f"reserved by one GPU, + {above:.0%} (GiB)", title=title)
        figure.legend(loc="outside lower left", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.SIMULATED], [device])
    return figure


def _tell(axes: Axes, told: Mapping[int, float], *, below: bool) -> None:
    """Write heights beside their points: left and above, or right and below."""
    beside = {"xytext": (5, -13), "ha": "left"} if below else {"xytext": (-6, 4), "ha": "right"}
    for tokens, height in told.items():
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
        axes.annotate(f"{height:,.0f}", (tokens, height), textcoords="offset points", fontsize=10, bbox=ground, **beside)  # fmt: skip


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
        shown = [Patch(color="#3f90da", label="attention to these keys and values"),
                 Patch(facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="..", label="waits"),
                 Line2D([], [], color="black", ls="--", lw=1, label="a round ends")]  # fmt: skip
        figure.legend(handles=shown, loc="outside lower left", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def draw_steps(
    seconds: Mapping[tuple[int, int], float], *, ring: int, worst: float, no_room: int, title: str
) -> Figure:
    """Seconds of a step against tokens a second of one GPU: own sequences, and one shared around a ring.

    Args:
        seconds: of a step, by GPUs that share a sequence (1 or `ring`) and its tokens.
        ring: how many share.
        worst: of the shared tokens a second, what is left in the worst reading.
        no_room: tokens from which a GPU has no room for a sequence of its own.
        title: what stands above.
    """
    with course_style():
        figure, axes = empty_figure(9.5, 5.0)
        for tokens in sorted({length for _, length in seconds}):
            alone, shared = ((t := seconds[n, tokens], tokens / n / t) for n in (1, ring))
            bad = (shared[0] / worst, shared[1] * worst)
            full = tokens >= no_room
            axes.annotate("", shared, alone, arrowprops={"arrowstyle": "->", "color": "#777777"})  # fmt: skip
            axes.annotate("", bad, shared, arrowprops={"arrowstyle": "->", "color": "#777777", "ls": ":"})  # fmt: skip
            axes.plot(*alone, "X" if full else "o", color="#a96b59" if full else "#3f90da", ms=9)
            axes.plot(*shared, "P", color="#4d4d4d", ms=10)
            axes.plot(*bad, "P", color="#4d4d4d", mfc="none", ms=9)
            axes.annotate(_tokens(tokens), alone, textcoords="offset points", xytext=(0, 8), ha="center", fontsize=10)  # fmt: skip
            axes.annotate(_tokens(tokens), shared, textcoords="offset points", xytext=(0, 8), ha="center", fontsize=10)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = [2**power for power in range(3, 13)]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        ticks = [2**power for power in range(7, 12)]
        axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_ylim(2**7, 3 * 2**10)
        axes.set(xlabel="seconds a step", ylabel="tokens a second of one GPU", title=title)
        looks = (("own sequence", "o", "#3f90da", None), ("own, does not fit", "X", "#a96b59", None),
                 (f"shared by {ring}", "P", "#4d4d4d", None), (f"shared, at {worst:.2f} of the tokens a second", "P", "#4d4d4d", "none"))  # fmt: skip
        shown = [Line2D([], [], ls="", marker=mark, color=color, mfc=face or color, ms=9, label=name) for name, mark, color, face in looks]  # fmt: skip
        figure.legend(handles=shown, loc="outside lower left", ncols=4, fontsize=10)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _draw_work(axes: Axes, row: float, begin: float, work: float, source: int) -> None:
    axes.barh(row, work, left=begin, height=0.8, color="#3f90da", edgecolor="white")
    axes.text(begin + work / 2, row, f"rank {source}'s KV", ha="center", va="center", fontsize=10, color="white")  # fmt: skip


check_public(globals())
