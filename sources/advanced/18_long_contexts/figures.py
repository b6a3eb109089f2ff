"""Pictures of lesson 18: peaks over the length, and who works and who waits around a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .timed import Span

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
        room_bytes: of the GPU.
        above: how far a band reaches over each curve that can fit, as a part of it.
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
                tops = [height * (1 + above) for height in heights]
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
        axes.legend(shown, [*(names[i] for i in order), f"up to {above:.0%} above"], fontsize=10)
        print_evidence(figure, [Evidence.SIMULATED], [device])
    return figure


def _tokens(count: int) -> str:
    return f"{count // 2**20}M" if count >= 2**20 else f"{count // 1024}k"


def draw_rounds(
    runs: Mapping[str, Sequence[Sequence[Span]]],
    *,
    slept_seconds: Mapping[str, float],
    title: str,
    device: str,
) -> Figure:
    """For each layout a band, for each rank a row: when it computed with whose keys, and when it had none.

    Args:
        runs: by layout, the spans of each rank.
        slept_seconds: by layout, of its busiest rank, if only sleeping took time.
        title, device: what stands above, and whose numbers they are.
    """
    with course_style():
        figure, axes = empty_figure(9.5, 1.4 + 1.5 * len(runs))
        rows, names, latest = 0, [], 0.0
        for layout, ranks in runs.items():
            end = max(spans[-1].end for spans in ranks)
            latest = max(latest, end)
            for rank, spans in enumerate(ranks):
                axes.barh(rows, end, height=0.8, color="#eeeeee", edgecolor="#bbbbbb", hatch="..")
                for turn, span in enumerate(spans):
                    axes.barh(
                        rows, span.end - span.start, left=span.start, height=0.8,
                        color="#3f90da", edgecolor="white",
                    )  # fmt: skip
                    axes.text((span.start + span.end) / 2, rows, f"keys {(rank - turn) % len(ranks)}",
                              ha="center", va="center", fontsize=10, color="white")  # fmt: skip
                names.append((rows, f"{layout}, rank {rank}"))
                rows += 1
            axes.vlines(
                slept_seconds[layout], rows - len(ranks) - 0.5, rows - 0.5, color="black", ls="--"
            )
            rows += 0.6
        axes.set_yticks([row for row, _ in names], [name for _, name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02 * latest)
        axes.grid(False, axis="y")
        axes.set(xlabel="seconds", title=title)
        shown = [Patch(color="#3f90da", label="attention to the keys of a rank"),
                 Patch(facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="..", label="idle"),
                 Line2D([], [], color="black", ls="--", label="the busiest rank's sleeps alone")]  # fmt: skip
        figure.legend(handles=shown, loc="outside lower left", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


check_public(globals())
