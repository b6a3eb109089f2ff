"""The verdict as a picture: days and dollars of each way out, beside deadline and budget."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from utils.planner import Estimate
from utils.planner.run_cost import Cost
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

from .answers import days_from_prediction
from .review import Review

__all__ = ["draw_ways_out"]

RANGE, LIMIT, DARK = "#9ec8ee", "#bd1f01", "#222222"
MARKS = "D^s"
CLOSE = 0.03  # of the limit: what lies nearer has its number beside it


def draw_ways_out(
    judged: Mapping[str, tuple[Estimate, Review]],
    *,
    days: float,
    usd: float,
    middle: float,
    slower: Mapping[str, float],
) -> Figure:
    """Ranges of days and dollars as bars, and what slower runs would take.

    Args:
        judged: A plan and its review, by name.
        days, usd: Deadline and budget.
        middle: Published over predicted seconds, where the middle is marked.
        slower: Multiples of the predicted middle, by the words of the legend; three at most.

    Raises:
        ValueError: no plans, or more multiples than marks.
    """
    if not judged or len(slower) > len(MARKS):
        raise ValueError(f"draw_ways_out() needs plans, and {len(MARKS)} multiples at most.")
    bills = {name: verdict.cost for name, (_, verdict) in judged.items()}
    with course_style():
        figure = Figure(figsize=(10.5, 1.9 + 0.5 * len(bills)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _panel(left, [_span(bill, 1.0, bill.days) for bill in bills.values()], days, middle, slower)
        dollars = [_span(bill, bill.usd / bill.days / 1e6, bill.days) for bill in bills.values()]
        _panel(right, dollars, usd / 1e6, middle, slower)
        left.set_yticks(range(len(bills)), list(bills), fontsize=9)
        left.set_ylim(len(bills) - 0.5, -0.5)
        left.set_xlabel("days")
        right.set_xlabel("million dollars")
        figure.suptitle("Days and dollars of each way out, 64 GPUs and 8 spare", x=0.01, ha="left",
                        fontweight="bold")  # fmt: skip
        figure.legend(handles=_legend(slower), loc="outside lower center", ncols=3, fontsize=9)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _span(bill: Cost, unit: float, middle: float) -> tuple[float, float, float]:
    """The prediction, middle and slow end, in days times the unit."""
    low, high = days_from_prediction(bill)
    return low * unit, middle * unit, high * unit


def _panel(
    axes: Axes,
    spans: list[tuple[float, float, float]],
    limit: float,
    middle: float,
    slower: Mapping[str, float],
) -> None:
    for height, (low, center, high) in enumerate(spans):
        axes.barh(height, high - low, left=low, height=0.5, color=RANGE, edgecolor=DARK, lw=0.8)
        axes.plot([middle * center] * 2, [height - 0.25, height + 0.25], color=DARK, lw=2.5)
        for mark, factor in zip(MARKS, slower.values(), strict=False):
            axes.plot(factor * center, height, mark, ms=6, mfc="white", mec=DARK, mew=1.4, zorder=4)
            if abs(factor * center / limit - 1) < CLOSE:  # on which side of the limit is not seen
                axes.annotate(
                    f"{factor * center:.3g}", (factor * center, height), (10, 0),
                    textcoords="offset points", va="center", fontsize=9, fontweight="bold",
                )  # fmt: skip
    axes.axvline(limit, color=LIMIT, ls="--", lw=1.8)
    axes.set_xlim(left=0)
    axes.grid(False, axis="y")


def _legend(slower: Mapping[str, float]) -> list[Patch | Line2D]:
    marks = [
        Line2D([], [], marker=mark, ls="", ms=6, mfc="white", mec=DARK, mew=1.4, label=words)
        for mark, words in zip(MARKS, slower, strict=False)
    ]
    return [
        Patch(facecolor=RANGE, edgecolor=DARK, label="from the prediction to the slow end"),
        Line2D([], [], color=DARK, lw=2.5, label="middle, as Megatron-LM's runs took"),
        Line2D([], [], color=LIMIT, ls="--", lw=1.8, label="deadline, budget"),
        *marks,
    ]
