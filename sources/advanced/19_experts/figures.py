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
_WAYS = (("#4d4d4d", "-"), ("#3f90da", "--"), ("#bd1f01", "-"))


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
        axes.set_title("Arithmetic follows the circles, model states the squares")
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
        figure, axes = empty_figure(height=4.4)
        axes.set_axis_off()
        axes.add_patch(
            FancyBboxPatch(
                (-0.34, -0.3),
                1.68,
                1.75,
                boxstyle="round,pad=0",
                fc="none",
                ec="#4d4d4d",
                ls="--",
                lw=1.5,
            )
        )
        for rank in range(4):
            replica, place = divmod(rank, 2)
            first = 4 * place + 2 * replica
            text = (
                f"rank {rank}\ncomputes experts {4 * place} to {4 * place + 3}\n"
                f"keeps {first} and {first + 1}"
            )
            _box(axes, place, replica, text)
        for line in range(2):
            _both_ways(axes, (0.27, line), (0.73, line), _ROWS)
            _both_ways(axes, (line, 0.2), (line, 0.8), _WEIGHTS)
            axes.text(0.5, line - 0.09, "all-to-all: rows", ha="center", color=_ROWS)
        axes.text(0.5, 0.5, "FSDP over replicas: gathers\nexperts' weights, sums their\ngradients over 2, divides by 4", ha="center",
                  va="center", color=_WEIGHTS)  # fmt: skip
        axes.text(0.5, 1.34, "FSDP over all four ranks: all the rest, summed over 4, divided by 4",
                  ha="center", va="center")  # fmt: skip
        axes.text(-0.38, 0, "replica 0", ha="right", va="center")
        axes.text(-0.38, 1, "replica 1", ha="right", va="center")
        axes.set_xlim(-0.62, 1.4)
        axes.set_ylim(1.5, -0.36)
        axes.set_title("Two groups: experts over their replicas, the rest over all ranks")
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
    """Busiest expert, and busiest rank, over their means: a thin line is a seed, a thick one the seeds' mean.

    Args:
        loads: for each way, the rows of each expert by step, (steps, E), of every seed.
        ranks: that share the experts, neighbours on one.
    """
    last = max(len(run) for runs in loads.values() for run in runs)
    with course_style():
        figure = Figure(figsize=(9.0, 4.2), layout="constrained")
        both = figure.subplots(1, 2)
        for axes, parts in zip(both, (0, ranks), strict=True):
            for (way, runs), (color, line) in zip(loads.items(), _WAYS, strict=True):
                seeds = torch.stack([_over_mean(run, parts) for run in runs])
                steps = range(1, 1 + seeds.shape[1])
                axes.plot(steps, seeds.mean(0), line, color=color, lw=2, label="" if parts else way)
                for seed in seeds:
                    axes.plot(steps, seed, line, color=color, lw=0.8, alpha=0.5)
            said = "all rows on one rank" if parts else "every token chooses it"
            for height, text in ((1, "even"), (4, said)):
                axes.axhline(height, color="black", lw=0.8, ls=":")
                axes.text(last, height + 0.04, text, fontsize=10, ha="right", va="bottom")
            axes.set_ylim(0.8, 4.3)
            axes.set_xlabel("step (mean of up to five)")
        both[0].set_ylabel("rows / mean")
        both[0].set_title("the busiest of 8 experts, k = 2", fontsize=11)
        both[1].set_title(f"the busiest of {ranks} ranks, two experts each", fontsize=11)
        figure.suptitle(
            "Rows over the mean: thin lines are seeds, thick ones their mean", weight="bold"
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


def draw_crossing(
    layouts: Mapping[str, tuple[float, float, float]], across_gb_per_second: float
) -> Figure:
    """Two nodes for each layout, what crosses between them, and how much of it in a step.

    Args:
        layouts: {name: (GB of rows inside the node, GB of rows across, GB of weights and gradients across)},
            first replicas in both nodes, then rows for each expert, then rows for each node.
        across_gb_per_second: of one rank between nodes.
    """
    draws = (_draw_replicas, _draw_rows, _draw_once)
    with course_style():
        figure = Figure(figsize=(9.0, 4.9), layout="constrained")
        places = figure.subplots(1, len(layouts))
        for axes, draw, (name, parts) in zip(places, draws, layouts.items(), strict=True):
            inside, rows, weights = parts
            axes.set_axis_off()
            for node, y in ((0, 0.66), (1, 0.1)):
                corner = (0.04, y)
                box = FancyBboxPatch(
                    corner, 0.92, 0.24, boxstyle="round,pad=0.02", fc="none", ec="black"
                )
                axes.add_patch(box)
                axes.text(0.05, y, f"node {node}", fontsize=10)
            draw(axes)
            across = rows + weights
            said = f"across: {across:.1f} GB, {across / across_gb_per_second:.2f} s\ninside: {inside:.1f} GB"
            axes.text(0.5, 0.0, said, ha="center", va="top", fontsize=10)
            axes.set_xlim(0, 1)
            axes.set_ylim(-0.12, 0.95)
            axes.set_title(name, fontsize=11)
        figure.suptitle("What a rank sends in a step of 4,096 tokens, load 1", weight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


_PLACES = (0.2, 0.4, 0.6, 0.8)


def _draw_replicas(axes: Axes) -> None:
    for y in (0.74, 0.18):
        axes.text(0.5, y, "all experts: rows stay here", ha="center", va="center", fontsize=10)
    look = {"arrowstyle": "<->", "color": _WEIGHTS, "ls": "--", "lw": 3}
    axes.annotate("", (0.25, 0.64), (0.25, 0.36), arrowprops=look)
    said = "weights and\ngradients of\nreplicas"
    axes.text(0.33, 0.5, said, color=_WEIGHTS, va="center", fontsize=10)


def _draw_rows(axes: Axes) -> None:
    _draw_ends(axes)
    for x in _PLACES:
        _row(axes, (0.5, 0.71), (x, 0.23), 2)
    axes.text(0.5, 0.56, "a row for each expert", ha="center", fontsize=10, bbox=_WHITE, zorder=3)


def _draw_once(axes: Axes) -> None:
    _draw_ends(axes)
    axes.scatter(0.5, 0.3, s=70, color=_ROWS, edgecolor="black", zorder=3)
    _row(axes, (0.5, 0.71), (0.5, 0.33), 2)
    for x in _PLACES:
        _row(axes, (0.5, 0.3), (x, 0.21), 1)
    axes.text(0.5, 0.5, "the vector once", ha="center", fontsize=10, bbox=_WHITE, zorder=3)
    axes.text(0.96, 0.29, "passed on", ha="right", fontsize=10)


_WHITE = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"}


def _draw_ends(axes: Axes) -> None:
    axes.scatter(0.5, 0.74, s=70, color=_ROWS, edgecolor="black", zorder=3)
    axes.text(0.5, 0.8, "a token's vector", ha="center", fontsize=10)
    axes.scatter(_PLACES, (0.17,) * 4, s=70, marker="s", color=_HELD, edgecolor="black", zorder=3)
    axes.text(0.5, 0.09, "4 of its 8 experts", ha="center", fontsize=10)


def _row(axes: Axes, start: tuple[float, float], end: tuple[float, float], width: float) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _ROWS, "lw": width})
