"""Runs that fail: where their time went, and goodput over the interval between checkpoints."""

from __future__ import annotations

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
                )
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
        figure.legend(handles=handles, loc="outside right upper")
        print_evidence(figure, [evidence])
    return figure


def draw_goodput(
    simulated: Mapping[str, Mapping[float, Sequence[float]]],
    formula: Mapping[str, Mapping[float, float]],
    *,
    title: str,
) -> Figure:
    """Goodput over the interval: simulated runs as points, a formula as a line, its best marked.

    Args:
        simulated: by name, the goodput of each run by the seconds between two checkpoints. The
            whisker spans 95% of the runs.
        formula: by the same names, one value by seconds.
        title: of the figure.

    Raises:
        ValueError: other names in one than in the other, or more of them than lines look apart.
    """
    if set(simulated) != set(formula) or not 1 <= len(formula) <= len(_LINES):
        raise ValueError(
            f"draw_goodput() takes 1 to {len(_LINES)} names, the same simulated and by formula."
        )
    with course_style():
        figure, axes = empty_figure(height=4.0)
        for (name, curve), look in zip(formula.items(), _LINES, strict=False):
            _draw_curve(axes, name, curve, simulated[name], look)
        axes.set_xscale("log")
        ticks = (60, 300, 900, 3600, 4 * 3600, 24 * 3600)
        axes.set_xticks(ticks, ["1 min", "5 min", "15 min", "1 h", "4 h", "1 day"])
        axes.minorticks_off()
        axes.set_xlabel("work between two checkpoints")
        axes.set_ylabel("goodput")
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_title(title)
        axes.legend(
            loc="lower center",
            title="lines: formula, star: its best; points: mean of runs, bars: 95% of them",
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
    columns = 3
    rows = -(-len(resumed) // columns)
    with course_style():
        figure = Figure(figsize=(9.6, 0.9 + 2.1 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes, (name, losses) in zip(panels, resumed.items(), strict=False):
            axes.plot(
                range(1, len(uninterrupted) + 1),
                uninterrupted,
                color="#b8bbc2",
                lw=4.5,
                label="never stopped",
            )
            axes.plot(
                range(first_step + 1, len(uninterrupted) + 1),
                losses,
                color="#832db6",
                lw=1.6,
                ls="-",
                label="resumed",
            )
            axes.axvline(first_step + 0.5, color="black", ls=":", lw=1)
            axes.set_title(_apart(name, losses, uninterrupted[first_step:]), fontsize=10)
        for axes in panels[len(resumed) :]:
            axes.set_axis_off()
        for axes in panels[::columns]:
            axes.set_ylabel("loss")
        for axes in panels[-columns:]:
            axes.set_xlabel("step")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


def _apart(name: str, losses: Sequence[float], wanted: Sequence[float]) -> str:
    differences = [abs(a - b) for a, b in zip(losses, wanted, strict=True) if a != b]
    by = f", by up to {max(differences):.2f}" if differences else ""
    return f"{name}: {len(differences)}{by}"


__all__ = ["draw_days", "draw_forgotten", "draw_goodput"]

check_public(globals())
