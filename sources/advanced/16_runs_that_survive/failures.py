"""Runs that fail: where their time went, and goodput over the interval between checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import Evidence
from utils.views.lanes import Span
from utils.views.style import course_style, empty_figure, print_evidence, wrapped

# By kind: colour and hatch, apart in grey as well.
_KINDS = {
    "work": ("#92dadd", ""),
    "saving": ("#717581", ""),
    "lost": ("#832db6", "xx"),
    "restarting": ("#ffa90e", "//"),
    "waiting": ("#e6e6e6", ".."),
}
_LINES = (("#3f90da", "o", "-"), ("#832db6", "s", "--"), ("#717581", "^", "-."))
DAY_SECONDS = 86_400.0
MOST_MARKED = 60
INSET_GOODPUT = (0.92, 1.0)
INSET_SECONDS = (20 * 60, 8 * 3600)


def draw_days(
    lanes: Mapping[str, Sequence[Span]], *, title: str, evidence: Evidence = Evidence.SIMULATED
) -> Figure:
    """Runs as bars over days, one row a run; kinds are those of `failing_runs`.

    Raises:
        ValueError: there is nothing to draw, or a kind that has no colour.
    """
    kinds = {span.kind for lane in lanes.values() for span in lane}
    if not kinds or kinds - set(_KINDS):
        raise ValueError(f"draw_days() draws spans of the kinds {', '.join(_KINDS)}; got {kinds}.")
    with course_style():
        figure, axes = empty_figure(height=1.6 + 0.55 * len(lanes))
        for row, lane in enumerate(lanes.values()):
            for span in lane:
                _draw_span(axes, row, span)
            saves = [span.end_seconds / DAY_SECONDS for span in lane if span.kind == "saving"]
            if len(saves) <= MOST_MARKED:  # a save is thinner than a pixel: a line shows it
                axes.vlines(saves, row - 0.31, row + 0.31, color=_KINDS["saving"][0], lw=1.2)
        axes.set_yticks(range(len(lanes)), [wrapped(name) for name in lanes])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlabel("days")
        axes.set_title(title)
        handles = [
            Patch(facecolor=c, hatch=h, edgecolor="white", label=kind)
            for kind, (c, h) in _KINDS.items()
            if kind in kinds
        ]
        figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
        print_evidence(figure, [evidence])
    return figure


def _draw_span(axes: Axes, row: int, span: Span) -> None:
    color, hatch = _KINDS[span.kind]
    axes.barh(
        row,
        (span.end_seconds - span.start_seconds) / DAY_SECONDS,
        height=0.62,
        left=span.start_seconds / DAY_SECONDS,
        color=color,
        hatch=hatch,
        linewidth=0,
        edgecolor="white",
        snap=False,  # else regular saves fall on pixels irregularly
    )


def draw_goodput(
    simulated: Mapping[str, Mapping[float, Sequence[float]]],
    formula: Mapping[str, Mapping[float, float]],
    *,
    title: str,
    bet_seconds: float | None = None,
) -> Figure:
    """Goodput over the interval: simulated runs as points, a formula as a line, its best marked.

    Args:
        simulated: by name, the goodput of each run by the seconds between two checkpoints. The
            whisker spans 95% of the runs.
        formula: by the same names, one value by seconds.
        title: of the figure.
        bet_seconds: an interval that the reader bet on, drawn as an upright line.

    Raises:
        ValueError: other names in one than in the other, or more of them than lines look apart.
    """
    if set(simulated) != set(formula) or not 1 <= len(formula) <= len(_LINES):
        raise ValueError(
            f"draw_goodput() takes 1 to {len(_LINES)} names, the same simulated and by formula."
        )
    with course_style():
        figure, axes = empty_figure(height=4.6)
        inset = axes.inset_axes((0.44, 0.09, 0.38, 0.47))
        for area in (axes, inset):
            for (name, curve), look in zip(formula.items(), _LINES, strict=False):
                _draw_curve(area, name, curve, simulated[name], look)
            if bet_seconds is not None:
                area.axvline(bet_seconds, color="black", ls=":", lw=1.5, label="your bet")
            area.set_xscale("log")
            area.yaxis.set_major_formatter("{x:.0%}")
            area.minorticks_off()
        ticks = (60, 300, 900, 3600, 4 * 3600, 24 * 3600)
        axes.set_xticks(ticks, ["1 min", "5 min", "15 min", "1 h", "4 h", "1 day"])
        inset.set_xticks((1800, 3600, 4 * 3600), ["30 min", "1 h", "4 h"])
        inset.set_xlim(*INSET_SECONDS)
        inset.set_ylim(*INSET_GOODPUT)
        inset.tick_params(labelsize=8)
        inset.set_title("the top, enlarged", fontsize=9)
        axes.set_xlabel("work between two checkpoints")
        axes.set_ylabel("goodput")
        axes.set_title(title)
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower left",
            ncols=3,
            fontsize=9,
            title="lines: formula, star: its best; points: mean of runs, bars: 95% of them",
            title_fontsize=9,
        )
        print_evidence(figure, [Evidence.SIMULATED, Evidence.PREDICTED])
    return figure


def _draw_curve(
    axes: Axes,
    name: str,
    curve: Mapping[float, float],
    runs: Mapping[float, Sequence[float]],
    look: tuple[str, str, str],
) -> None:
    color, marker, dash = look
    axes.plot(list(curve), list(curve.values()), dash, color=color, lw=2, label=name)
    best = max(curve, key=lambda seconds: curve[seconds])
    axes.plot(best, curve[best], "*", ms=17, color=color, markeredgecolor="black", zorder=2)
    for seconds, found in runs.items():
        low, middle, high = np.quantile(found, 0.025), np.mean(found), np.quantile(found, 0.975)
        whiskers = np.maximum(0.0, np.array([[middle - low], [high - middle]]))
        axes.errorbar(
            seconds,
            float(middle),
            whiskers,
            marker=marker,
            ms=6,
            markeredgecolor="white",
            color=color,
            capsize=3,
            lw=1.2,
            zorder=3,
        )


def draw_forgotten(
    uninterrupted: Sequence[float],
    resumed: Mapping[str, Sequence[float]],
    first_step: int,
    *,
    title: str,
    device: str = "",
) -> Figure:
    """A panel for each resumed run: its losses, over those of the run that was never stopped.

    Args:
        uninterrupted: the losses of all steps.
        resumed: by what was forgotten, the losses after `first_step`.
        first_step: after which the checkpoint was saved.
        title: of the figure.
        device: where they ran.

    Raises:
        ValueError: there is nothing to draw, or a resumed run has another number of steps.
    """
    rest = len(uninterrupted) - first_step
    if not resumed or any(len(losses) != rest for losses in resumed.values()):
        raise ValueError(f"draw_forgotten() needs runs of {rest} steps after step {first_step}.")
    columns = min(3, len(resumed))
    rows = -(-len(resumed) // columns)
    steps = range(1, len(uninterrupted) + 1)
    with course_style():
        figure = Figure(figsize=(9.6, 0.9 + 2.5 * rows), layout="constrained")
        heights = [3, 2] * rows
        panels = figure.subplots(
            2 * rows, columns, sharex=True, sharey="row", squeeze=False, height_ratios=heights
        )
        for place, (name, losses) in enumerate(resumed.items()):
            row, column = divmod(place, columns)
            above, below = panels[2 * row][column], panels[2 * row + 1][column]
            above.plot(steps, uninterrupted, color="#b8bbc2", lw=4.5, label="never stopped")
            above.plot(steps[first_step:], losses, color="#832db6", lw=1.6, label="resumed")
            above.axvline(first_step + 0.5, color="black", ls=":", lw=1)
            above.set_title(_apart(name, losses, uninterrupted[first_step:]), fontsize=10)
            _draw_difference(below, steps[first_step:], losses, uninterrupted[first_step:])
            below.axvline(first_step + 0.5, color="black", ls=":", lw=1)
        for place in range(len(resumed), rows * columns):
            row, column = divmod(place, columns)
            panels[2 * row][column].set_axis_off()
            panels[2 * row + 1][column].set_axis_off()
        for row in range(rows):
            panels[2 * row][0].set_ylabel("loss")
            panels[2 * row + 1][0].set_ylabel("|difference|", fontsize=9)
        for axes in panels[-1]:
            axes.set_xlabel("step")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        handles = panels[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2)
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


def _draw_difference(
    axes: Axes, steps: Sequence[int], losses: Sequence[float], wanted: Sequence[float]
) -> None:
    """How far the two are apart, as points on a log axis; what is equal stands at its foot."""
    found = [(step, abs(a - b)) for step, a, b in zip(steps, losses, wanted, strict=True)]
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 1.0)
    axes.set_yticks([1e-7, 1e-4, 1e-1])
    axes.minorticks_off()
    axes.plot([s for s, d in found if d], [d for _, d in found if d], ".", color="#832db6", ms=6)
    equal = [step for step, difference in found if not difference]
    axes.plot(equal, [2e-8] * len(equal), "x", color="black", ms=4)
    if len(equal) == len(found):
        axes.text(steps[0], 1e-6, "x: equal to the last bit", fontsize=8)


def _apart(name: str, losses: Sequence[float], wanted: Sequence[float]) -> str:
    differences = [abs(a - b) for a, b in zip(losses, wanted, strict=True) if a != b]
    by = f", by up to {max(differences):.2f}" if differences else ""
    return f"{name}: {len(differences)}{by}"


def one_run(
    days: float, interval: float, save: float, restart: float, mean: float, seed: int
) -> list[Span]:
    """Days of work, saved after each interval, with failures at random; all others in seconds."""
    chance = random.Random(seed)
    spans: list[Span] = []
    clock = done = 0.0
    while True:
        fails_at = clock + chance.expovariate(1 / mean)
        while clock + interval + save <= fails_at and done < days * DAY_SECONDS:  # a whole save
            saved = clock + interval + save
            spans += [
                Span("work", clock, clock + interval),
                Span("saving", clock + interval, saved),
            ]
            clock, done = saved, done + interval
        if done >= days * DAY_SECONDS:
            return spans
        lost = Span("lost", clock, fails_at)
        spans += [lost, Span("restarting", fails_at, fails_at + restart)]
        clock = fails_at + restart


__all__ = ["draw_days", "draw_forgotten", "draw_goodput", "one_run"]

check_public(globals())
