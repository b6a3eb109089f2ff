"""The pictures of lesson 19."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

_HELD, _USED = "#832db6", "#ffa90e"
_ROWS, _WEIGHTS = "#bd1f01", "#2a6db0"
_WAYS = (("#4d4d4d", ":"), ("#3f90da", "--"), ("#bd1f01", "-"))


def draw_held_and_used(models: Mapping[str, tuple[float, float]]) -> Figure:
    """What each model uses for a token, and what it holds, in units of 1e9: {name: (held, used)}."""
    with course_style():
        figure, axes = empty_figure(height=1.6 + 0.7 * len(models))
        for row, (held, used) in enumerate(models.values()):
            axes.plot([used, held], [row, row], color="#4d4d4d", lw=2, zorder=1)
            marks = (
                (used, "o", _USED, "used for a token"),
                (held, "s", _HELD, "held, with model states of each"),
            )
            for size, marker, color, label in marks:
                axes.scatter(
                    size, row, s=110, marker=marker, color=color, edgecolor="black", zorder=2,
                    label="" if row else label,
                )  # fmt: skip
                axes.text(size, row - 0.24, f"{size:,.1f}B", ha="center", fontsize=10)
            middle = (used * held) ** 0.5
            axes.text(
                middle, row + 0.08, f"{held / used:.1f} times", ha="center", va="top", fontsize=10
            )
        axes.set_xscale("log")
        axes.set_xlim(1.5, 2500)
        ticks = (3, 10, 30, 100, 300, 1000)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(models)), list(models))
        axes.set_ylim(len(models) - 0.5, -0.6)
        axes.set_xlabel("parameters, B = 10\N{SUPERSCRIPT NINE} (log scale)")
        axes.set_title("What a token uses, and what is held")
        axes.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
        figure.supxlabel(
            "counted, from shapes",
            x=0.995,
            ha="right",
            fontsize=10,
            color="#555555",
            style="italic",
        )
    return figure


def draw_dispatch(choice: Tensor, experts: int) -> Figure:
    """Rows of some tokens, by token, sorted by expert, and back: `choice` is (tokens, k), the experts of each."""
    k = choice.shape[1]
    chosen = choice.flatten().tolist()
    order = sorted(range(len(chosen)), key=chosen.__getitem__)  # equals stay in their order
    with course_style():
        figure, axes = empty_figure(height=4.6)
        axes.set_axis_off()
        for place, row in enumerate(order):
            for level, at in ((2.0, row), (0.0, row), (1.0, place)):
                _row_box(axes, at, level, row // k, chosen[row])
            _fall(axes, (row, 2.0), (place, 1.0))
            _fall(axes, (place, 1.0), (row, 0.0))
        for expert in range(experts):
            places = [place for place, row in enumerate(order) if chosen[row] == expert]
            if places:
                corner, width = (places[0] - 0.45, 0.7), places[-1] - places[0] + 0.9
                box = FancyBboxPatch(
                    corner,
                    width,
                    0.6,
                    boxstyle="round,pad=0",
                    fc="none",
                    ec="black",
                    ls="--",
                    lw=1.2,
                )
                axes.add_patch(box)
        for level, name in ((2.0, "by token"), (1.0, "by expert"), (0.0, "by token\nagain")):
            axes.text(-0.75, level, name, ha="right", va="center", fontsize=11)
        for token in range(len(choice)):
            middle = k * token + (k - 1) / 2
            said = f"token {token}:\nweighted sum of {k}"
            axes.text(middle, -0.42, said, ha="center", va="top", fontsize=10)
        axes.set_xlim(-2.1, len(order) - 0.4)
        axes.set_ylim(-0.75, 2.45)
        axes.set_title(
            f"Dispatch and combine of {len(choice)} tokens, k = {k} of {experts} experts: each box is a row"
        )
    return figure


_FILLS = ("#92dadd", "#ffd58a", "#e3c3f2", "#d9d9d9")


def _row_box(axes: Axes, x: float, y: float, token: int, expert: int) -> None:
    style = {"boxstyle": "round,pad=0.3", "fc": _FILLS[expert % len(_FILLS)], "ec": "black"}
    text = f"token {token}\nexpert {expert}"
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=style, zorder=3)


def _fall(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow from the lower edge of a row's box to the upper edge of another."""
    look = {"arrowstyle": "->", "color": "#4d4d4d", "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
    (x0, y0), (x1, y1) = start, end
    axes.annotate("", (x1, y1 + 0.16), (x0, y0 - 0.16), arrowprops=look, zorder=1)


def draw_exchange(rows: Tensor, tokens: int, k: int, marked: int = 1) -> Figure:
    """Rows of each rank (down) for each rank (across), there and back; those of rank `marked` with numbers.

    Those that stay on their rank have a dashed arrow. A load is a rank's rows over the mean rank's.
    """
    ranks, held = len(rows), 2
    loads = (rows.sum(0) / rows.sum() * ranks).tolist()
    with course_style():
        figure, axes = empty_figure(height=4.6)
        axes.set_axis_off()
        for rank in range(ranks):
            names = f"experts {held * rank}, {held * rank + 1}"
            _box(axes, 0.0, rank, f"rank {rank}'s tokens\n{int(rows[rank].sum())} rows put in")
            came = f"{int(rows[:, rank].sum())} rows came: load {loads[rank]:.2f}"
            _box(axes, 1.0, rank, f"rank {rank}: {names}\n{came}")
            _box(axes, 2.0, rank, f"rank {rank}'s tokens\n{int(rows[rank].sum())} rows are back")
        for source in range(ranks):
            for target in range(ranks):
                number = f"{int(rows[source, target])}" if source == marked else ""
                line = "--" if source == target else "-"
                _arrow(axes, (0.0, source), (1.0, target), number, 0.66, line)
                _arrow(axes, (1.0, target), (2.0, source), number, 0.34, line)
        axes.text(0.5, -0.72, "dispatch: all-to-all", ha="center", fontsize=11)
        axes.text(1.5, -0.72, "combine: all-to-all back", ha="center", fontsize=11)
        said = "dashed: rows whose expert is on their own rank. Backward sends gradients the same two ways."
        axes.text(1.0, ranks - 0.45, said, ha="center", fontsize=10)
        axes.set_xlim(-0.32, 2.32)
        axes.set_ylim(ranks - 0.3, -0.95)
        axes.set_title(
            f"Forward of one layer, {tokens} tokens a rank, k = {k}; numbers: rank {marked}'s rows"
        )
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def draw_mesh() -> Figure:
    """Four ranks as 2 replicas x 2 expert ranks: who holds which of 8 experts, and which traffic runs where."""
    with course_style():
        figure, axes = empty_figure(height=4.7)
        axes.set_axis_off()
        for rank in range(4):
            replica, place = divmod(rank, 2)
            first = 4 * place + 2 * replica
            text = (
                f"rank {rank}, tokens of batch {rank}\ncomputes experts {4 * place} to {4 * place + 3}\n"
                f"keeps {first}, {first + 1}, and 1/4 of the rest"
            )
            _box(axes, place, replica, text)
            side = -0.42 if place == 0 else 1.42
            axes.plot([place, side], [replica, replica], "--", color="#4d4d4d", zorder=0)
        around = [-0.42, -0.42, 1.42, 1.42], [0, 1.36, 1.36, 0]
        axes.plot(*around, "--", color="#4d4d4d", zorder=0)
        for line in range(2):
            _both_ways(axes, (0.32, line), (0.68, line), _ROWS)
            _both_ways(axes, (line, 0.2), (line, 0.8), _WEIGHTS)
            axes.text(0.5, line - 0.07, "all-to-all: rows", ha="center", color=_ROWS)
        axes.text(0.5, 0.5, "FSDP over `replicas`: gathers two\nexperts from the other rank, sums\ngradients over 2, divides by 4", ha="center",
                  va="center", color=_WEIGHTS)  # fmt: skip
        said = "dashed: FSDP over all four ranks gathers 3/4 of the rest, sums its gradients over 4, divides by 4"
        axes.text(0.5, 1.42, said, ha="center", va="top", fontsize=10)
        axes.text(0.5, -0.32, "axis `experts`: the ranks that share them", ha="center", color=_ROWS)
        axes.text(-0.5, 0.5, "axis\n`replicas`", ha="right", va="center", color=_WEIGHTS)
        axes.set_xlim(-0.78, 1.5)
        axes.set_ylim(1.55, -0.42)
        axes.set_title(
            "Each rank is in three groups: for rows, for its experts' weights, for all the rest"
        )
    return figure


def _box(axes: Axes, x: float, y: float, text: str) -> None:
    style = {"boxstyle": "round,pad=0.4", "fc": "white", "ec": "black"}
    axes.text(x, y, text, ha="center", va="center", fontsize=10, bbox=style, zorder=3)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    number: str,
    at: float,
    line: str,
) -> None:
    """From the right edge of a box to the left edge of another, dark and with its number, or pale."""
    half = {0.0: 0.2, 1.0: 0.31, 2.0: 0.22}  # width of a box, by its place
    (x0, y0), (x1, y1) = (start[0] + half[start[0]], start[1]), (end[0] - half[end[0]], end[1])
    color, width = (_ROWS, 2.0) if number else ("#cccccc", 1.0)
    look = {"arrowstyle": "->", "color": color, "lw": width, "ls": line}
    axes.annotate("", (x1, y1), (x0, y0), arrowprops=look, zorder=2 if number else 1)
    if number:
        x, y = x0 + at * (x1 - x0), y0 + at * (y1 - y0)
        style = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"}
        axes.text(
            x, y, number, ha="center", va="center", fontsize=10, color=color, bbox=style, zorder=3
        )


def _both_ways(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "<->", "color": color, "lw": 2})


def draw_load(loads: Mapping[str, Sequence[Tensor]], ranks: int = 4) -> Figure:
    """Busiest expert, and busiest rank, over their means: a line is the seeds' mean, a band their least and most.

    Args:
        loads: for each way, the rows of each expert by step, (steps, E), of every seed.
        ranks: that share the experts, neighbours on one.
    """
    last = max(len(run) for runs in loads.values() for run in runs)
    seeds = len(next(iter(loads.values())))
    with course_style():
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        both = figure.subplots(1, 2)
        for axes, parts in zip(both, (0, ranks), strict=True):
            for (way, runs), (color, line) in zip(loads.items(), _WAYS, strict=True):
                over = torch.stack([_over_mean(run, parts) for run in runs])
                steps = range(1, 1 + over.shape[1])
                axes.plot(
                    steps, over.mean(0), line, color=color, lw=2.5, label="" if parts else way
                )
                axes.fill_between(steps, over.amin(0), over.amax(0), color=color, alpha=0.13, lw=0)
                for edge in (over.amin(0), over.amax(0)):
                    axes.plot(steps, edge, line, color=color, lw=0.7, alpha=0.7)
            said = "all rows on one rank" if parts else "every token chooses it"
            for height, text, side in ((0.96, "even", "top"), (4.04, said, "bottom")):
                axes.axhline(round(height), color="black", lw=0.8, ls=":")
                axes.text(last, height, text, fontsize=10, ha="right", va=side)
            axes.set_ylim(0.7, 4.3)
            axes.set_xlabel("step (mean of up to five)")
        both[0].set_ylabel("rows / mean")
        both[0].set_title("the busiest of 8 experts, k = 2", fontsize=11)
        both[1].set_title(f"busiest of {ranks} ranks, if two experts each", fontsize=11)
        figure.suptitle(
            f"Load in training: thick lines are means of {seeds} seeds, bands their least and most",
            weight="bold",
        )
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _over_mean(rows: Tensor, ranks: int) -> Tensor:
    """The busiest place's rows over the mean, smoothed: a mean of the last five steps, or of those there are."""
    places = rows.float()
    if ranks:
        places = places.view(len(rows), ranks, -1).sum(-1)
    over = places.amax(-1) / places.mean(-1)
    return torch.stack([over[max(0, step - 4) : step + 1].mean() for step in range(len(over))])
