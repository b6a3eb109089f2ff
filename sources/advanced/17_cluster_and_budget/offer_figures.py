"""The same loss at other sizes, spot by how often it is taken back, and offers against a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

from .scaling import ScalingLaw

__all__ = ["draw_offers", "draw_same_loss", "draw_spot_price", "verdict"]

LOOKS = [("#1170aa", "o", "-"), ("#c85200", "s", "--"), ("#717581", "^", "-.")]
FILLS = {
    "in time": ("#a8c8e4", ""),
    "too close to call": ("#f6c48f", "//"),
    "late": ("#d9d9d9", ".."),
}
WIDEST = 5  # sizes are drawn from the best one's fifth to five times it
DEAREST = 3.0  # times the least bill


def verdict(days: Sequence[float], deadline: float) -> str:
    """What a range of days means for a deadline.

    Args:
        days: The least and the most.
        deadline: In days.

    Raises:
        ValueError: no days.
    """
    if not days:
        raise ValueError("verdict() takes the least and the most days; there are none.")
    if max(days) <= deadline:
        return "in time"
    return "late" if min(days) > deadline else "too close to call"


def draw_same_loss(
    laws: Mapping[str, ScalingLaw],
    train_flop: float,
    usd: float,
    served_tokens: Sequence[float],
    loss: float,
    *,
    title: str,
) -> Figure:
    """Left: what other sizes cost for the same loss. Right: the size of fewest FLOP by tokens served.

    Args:
        laws: By name; 1 to 3. The first one is also that of the right part.
        train_flop: What is paid for at the best size.
        usd: What that costs.
        served_tokens: The demands of the right part.
        loss: What the models of the right part reach.
        title: Of the figure.

    Raises:
        ValueError: no law, or more than three.
    """
    if not 1 <= len(laws) <= len(LOOKS):
        raise ValueError(f"draw_same_loss() draws 1 to {len(LOOKS)} laws; these are {len(laws)}.")
    first = next(iter(laws.values()))
    with course_style():
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        for (name, law), look in zip(laws.items(), LOOKS, strict=False):
            _valley(left, law, train_flop, usd, name, look)
        _half_and_twice(left, first, train_flop, usd)
        left.set_xscale("log")
        ticks = [5, 10, 20, 40, 80, 160]
        left.set_xticks(ticks, [f"{tick}B" for tick in ticks])
        left.minorticks_off()
        left.set_ylim(0.9 * usd / 1e6, DEAREST * usd / 1e6)
        left.set_xlabel("parameters")
        left.set_ylabel("training bill for the same loss (million $)")
        left.legend(fontsize=9, loc="upper right")
        _lifetimes(right, first, served_tokens, loss)
        right.set_title(f"to a loss of {loss:.2f}, by {next(iter(laws))}", fontsize=11)
        left.set_title("each law's best size, and the same loss at others", fontsize=11)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _bill(law: ScalingLaw, flop: float, size: float) -> float:
    """Training FLOP for the loss of the best size at `flop`, over `flop`."""
    loss = law.loss(law.best_parameters(flop), law.best_tokens(flop))
    return 6 * size * law.tokens_for(loss, size) / flop


def _valley(
    axes: Axes, law: ScalingLaw, flop: float, usd: float, name: str, look: tuple[str, str, str]
) -> None:
    color, marker, dash = look
    best, tokens = law.best_parameters(flop), law.best_tokens(flop)
    least = law.least_parameters(law.loss(best, tokens)) * 1.01
    sizes = np.geomspace(max(best / WIDEST, least), best * WIDEST, 200)
    bills = [usd / 1e6 * _bill(law, flop, size) for size in sizes]
    label = f"{name}: {best / 1e9:.1f}B on {tokens / 1e9:,.0f}B tokens"
    axes.plot(sizes / 1e9, bills, ls=dash, color=color, label=label)
    axes.plot([best / 1e9], [usd / 1e6], marker, color=color, ms=8)


def _half_and_twice(axes: Axes, law: ScalingLaw, flop: float, usd: float) -> None:
    best = law.best_parameters(flop)
    for times, word, shift in ((0.5, "half", (8, 6)), (2, "twice", (8, -12))):
        more = _bill(law, flop, times * best)
        axes.plot([times * best / 1e9], [more * usd / 1e6], "o", mfc="white", color=LOOKS[0][0])
        axes.annotate(
            f"{word}: {more - 1:+.0%}",
            (times * best / 1e9, more * usd / 1e6),
            shift,
            textcoords="offset points",
            fontsize=10,
            color=LOOKS[0][0],
        )


def _lifetimes(axes: Axes, law: ScalingLaw, served: Sequence[float], loss: float) -> None:
    sizes = [law.cheapest_parameters(loss, tokens) for tokens in served]
    axes.plot(served, [size / 1e9 for size in sizes], "o-", color=LOOKS[0][0])
    for tokens, size in zip(served, sizes, strict=True):
        axes.annotate(
            f"{law.tokens_for(loss, size) / size:.0f} training\ntokens a\nparameter",
            (tokens, size / 1e9),
            (7, 3),
            textcoords="offset points",
            fontsize=9,
        )
    axes.set_xscale("log")
    axes.set_xlim(served[0] / 2, served[-1] * 12)
    axes.set_xticks(list(served), [f"{tokens / 1e9:,.0f}B" for tokens in served])
    axes.minorticks_off()
    axes.set_ylim(0, 1.25 * max(sizes) / 1e9)
    axes.set_xlabel("tokens served in the model's life")
    axes.set_ylabel("size of fewest FLOP\n(billion parameters)")


def draw_spot_price(
    goodputs: Mapping[str, Sequence[tuple[float, float]]],
    price_ratio: float,
    marks: Mapping[str, float],
    *,
    title: str,
) -> Figure:
    """A useful hour of spot over one on demand, by how often a node is taken back.

    Args:
        goodputs: By name, (times a day that a node is taken back, goodput); 1 to 3.
        price_ratio: Spot's price over that on demand.
        marks: Rates that were observed, by where.
        title: Of the figure.

    Raises:
        ValueError: no line, or more than three.
    """
    if not 1 <= len(goodputs) <= len(LOOKS):
        raise ValueError(f"draw_spot_price() draws 1 to {len(LOOKS)} lines, not {len(goodputs)}.")
    with course_style():
        figure, axes = empty_figure(height=4.6)
        for (name, line), (color, _, dash) in zip(goodputs.items(), LOOKS, strict=False):
            rates, kept = zip(*line, strict=True)
            costs = [price_ratio / max(k, 1e-9) for k in kept]
            axes.plot(rates, costs, dash, color=color, label=name)
        axes.axhline(1, color="black", lw=1)
        axes.text(0.11, 1.02, "on demand costs the same", fontsize=10)
        for name, rate in marks.items():
            axes.axvline(rate, color="#555555", lw=1, ls=":")
            axes.text(rate, 1.98, f"AWS {name} ", rotation=90, va="top", ha="right", fontsize=9)
        axes.set_xscale("log")
        ticks = [0.1, 0.3, 1, 3, 10, 30]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(0.1, 30)
        axes.set_ylim(0, 2)
        axes.set_xlabel("how often each node is taken back (times a day)")
        axes.set_ylabel("dollars a useful hour,\nspot over on demand")
        longer = axes.secondary_yaxis(
            "right",
            functions=(
                lambda y: np.asarray(y) / price_ratio,
                lambda y: np.asarray(y) * price_ratio,
            ),
        )
        longer.set_ylabel("calendar time, times longer")
        axes.set_title(title)
        axes.legend(fontsize=10, loc="upper left", bbox_to_anchor=(0, 0.92))
        print_evidence(figure, [Evidence.PUBLISHED, Evidence.PREDICTED], ["the dotted lines"])
    return figure


def draw_offers(
    days: Mapping[str, Sequence[float]],
    usd: Mapping[str, Sequence[float]],
    obstacles: dict[str, str],
    deadline: float,
    *,
    title: str,
) -> Figure:
    """Days and dollars of each offer from its high to its low MFU, beside the deadline.

    Args:
        days: By offer, the least and the most.
        usd: By offer, the least and the most.
        obstacles: Why an offer cannot start, by offer.
        deadline: In days.
        title: Of the figure.

    Raises:
        ValueError: no offers, or days and dollars of different ones.
    """
    if not days or set(days) != set(usd):
        raise ValueError("draw_offers() takes days and dollars of the same offers, one or more.")
    names = [*days, *obstacles]
    with course_style():
        figure = Figure(figsize=(11, 0.9 + 0.46 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.4, 1))
        for place, name in enumerate(names):
            if name in obstacles:
                _say(left, 0, place, f"cannot start: {obstacles[name]}")
                continue
            color, hatch = FILLS[verdict(days[name], deadline)]
            for axes, values in ((left, days[name]), (right, [v / 1e3 for v in usd[name]])):
                least, most = min(values), max(values)
                axes.barh(place, most - least, 0.6, least, color=color, hatch=hatch, ec="#444444")
                digits = 1 if axes is left else 0
                edge = max(most, deadline) if axes is left else most
                _say(axes, edge, place, f"{least:.{digits}f} to {most:.{digits}f}")
        left.axvline(deadline, color="black", lw=1.5)
        left.set_xlim(0, 1.3 * max(max(pair) for pair in days.values()))
        right.set_xlim(0, 1.35 * max(max(pair) for pair in usd.values()) / 1e3)
        left.set_yticks(range(len(names)), names, fontsize=10)
        left.set_ylim(len(names) - 0.5, -0.5)
        left.set_xlabel(f"days of training (the line: {deadline:g} days)")
        right.set_xlabel("thousand dollars of rent")
        for axes in (left, right):
            axes.grid(axis="y", visible=False)
        looks = [Patch(fc=c, hatch=h, ec="#444444", label=word) for word, (c, h) in FILLS.items()]
        figure.legend(handles=looks, fontsize=10, loc="outside upper right", ncols=3)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
        print_evidence(figure, [Evidence.PUBLISHED, Evidence.PREDICTED])
    return figure


def _say(axes: Axes, x: float, place: float, text: str) -> None:
    """Words to the right of `x`, over whatever line crosses them."""
    box = {"fc": "white", "ec": "none", "pad": 1}
    axes.annotate(
        text, (x, place), (6, 0), textcoords="offset points", va="center", fontsize=10, bbox=box
    )


check_public(globals())
