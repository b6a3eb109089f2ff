"""Loss against tokens for several sizes, and what a budget should buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import Evidence, format_count
from utils.views.style import course_style, empty_figure, print_evidence

from .scaling import ScalingLaw

Run = tuple[float, float, float]  # parameters, tokens, loss
LOOKS = [
    ("#1170aa", "o", "-"),
    ("#c85200", "s", "--"),
    ("#717581", "^", "-."),
    ("black", "D", ":"),
    ("#832db6", "v", (0, (3, 1, 1, 1))),
]
MOST_SIZES = len(LOOKS)


def draw_runs(
    runs: Sequence[Run], law: ScalingLaw, *, title: str, held_out: Sequence[Run] = ()
) -> Figure:
    """Loss over tokens, a colour a size: points as trained, lines by the law.

    Args:
        runs: (parameters, tokens, loss) that the law was fitted to.
        law: Drawn through and beyond them.
        title: Of the figure.
        held_out: Runs that the fit did not see, as hollow points.

    Raises:
        ValueError: no runs, or more sizes than looks.
    """
    sizes = sorted({run[0] for run in [*runs, *held_out]})
    if not runs or len(sizes) > MOST_SIZES:
        raise ValueError(f"draw_runs() draws 1 to {MOST_SIZES} sizes; these are {len(sizes)}.")
    tokens = sorted({run[1] for run in [*runs, *held_out]})
    span = np.geomspace(tokens[0], tokens[-1], 100)
    with course_style():
        figure, axes = empty_figure(height=4.4)
        axes.set_xscale("log", base=2)
        for size, (color, marker, dash) in zip(sizes, LOOKS, strict=False):
            axes.plot(
                span,
                [law.loss(size, d) for d in span],
                ls=dash,
                color=color,
                lw=1.6,
                label=f"{format_count(size)} parameters",
            )
            for points, filled in ((runs, True), (held_out, False)):
                mine = [(d, loss) for n, d, loss in points if n == size]
                if mine:
                    axes.plot(
                        *zip(*mine, strict=True),
                        marker,
                        color=color,
                        ms=7,
                        mfc=color if filled else "white",
                        mew=1.6,
                    )
        axes.set_xticks(tokens, [format_count(d) for d in tokens])
        axes.set_xlabel("tokens (hollow: not used for the fit)" if held_out else "tokens")
        axes.set_ylabel("held-out loss (nats a token)")
        axes.set_title(title)
        axes.legend(fontsize=10)
        print_evidence(figure, [Evidence.MEASURED, Evidence.PREDICTED], ["this machine"])
    return figure


def draw_purchase(
    laws: Mapping[str, ScalingLaw],
    train_flop: float,
    served_tokens: Sequence[float],
    loss: float,
    *,
    title: str,
) -> Figure:
    """Left: loss by size at one budget. Right: tokens a parameter, by tokens served in a life.

    Args:
        laws: By name; 1 to 3.
        train_flop: The budget of the left part.
        served_tokens: The demands of the right part.
        loss: What the models of the right part must reach by the first law; the others reach what
            they give at the first one's best size and tokens.
        title: Of the figure.

    Raises:
        ValueError: no law, or more than three.
    """
    if not 1 <= len(laws) <= 3:
        raise ValueError(f"draw_purchase() draws 1 to 3 laws; these are {len(laws)}.")
    with course_style():
        figure = Figure(figsize=(10.5, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (name, law), look in zip(laws.items(), LOOKS, strict=False):
            _valley(left, law, train_flop, name, look)
            _lifetimes(right, law, served_tokens, _same_quality(laws, law, loss), name, look)
        left.legend(fontsize=9, loc="upper center")
        right.legend(fontsize=9, loc="upper left")
        left.set_title("the same dollars", fontsize=11)
        right.set_title("the same loss", fontsize=11)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=13)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _same_quality(laws: Mapping[str, ScalingLaw], law: ScalingLaw, loss: float) -> float:
    """The loss by `law` of the model that reaches `loss` with the least training by the first."""
    first = next(iter(laws.values()))
    size = first.cheapest_parameters(loss)
    return law.loss(size, first.tokens_for(loss, size))


def _valley(axes: Axes, law: ScalingLaw, flop: float, name: str, look: tuple) -> None:
    color, marker, dash = look
    best = law.best_parameters(flop)
    sizes = np.geomspace(best / 12, best * 12, 200)
    floor = law.loss(best, flop / 6 / best)
    axes.plot(
        sizes / 1e9,
        [law.loss(n, flop / 6 / n) - floor for n in sizes],
        ls=dash,
        color=color,
        label=f"{name}: {best / 1e9:.1f}B on {flop / 6 / best / 1e9:,.0f}B tokens",
    )
    axes.plot([best / 1e9], [0], marker, color=color, ms=8)
    axes.set_xscale("log")
    axes.set_ylim(-0.008, 0.16)
    axes.set_xlabel("parameters (billions), same training FLOP")
    axes.set_ylabel("loss above the law's best (nats)")


def _lifetimes(
    axes: Axes, law: ScalingLaw, served: Sequence[float], loss: float, name: str, look: tuple
) -> None:
    color, marker, dash = look
    ratios = []
    for tokens in served:
        size = law.cheapest_parameters(loss, tokens)
        ratios.append(law.tokens_for(loss, size) / size)
    axes.plot(served, ratios, marker=marker, ls=dash, color=color, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens served in the model's life")
    axes.set_ylabel("training tokens a parameter")


__all__ = ["draw_purchase", "draw_runs"]

check_public(globals())
