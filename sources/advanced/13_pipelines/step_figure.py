"""How long a step of each schedule takes: in theory, as drawn, and as measured rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["draw_steps"]

THEORY, DRAWN = "#717581", "#ffa90e"


def draw_steps(
    steps: Mapping[str, tuple[float, float, Sequence[float]]], *, title: str, width: float = 9.0
) -> Figure:
    """A row a schedule: a bar up to theory, one more up to the drawing, and a ring a measured round.

    Args:
        steps: seconds in theory, as drawn and of the measured rounds, by schedule, from top to bottom.
        title: of the figure.
        width: in inches.
    """
    with course_style():
        figure = Figure(figsize=(width, 1.4 + 0.5 * len(steps)), layout="constrained")
        axes = figure.subplots()
        for row, (theory, drawn, rounds) in enumerate(steps.values()):
            first = not row  # names each look once in the legend
            axes.barh(row, theory, 0.5, color=THEORY,
                      label="passes (predicted)" if first else None)  # fmt: skip
            axes.barh(row, drawn - theory, 0.5, left=theory, color=DRAWN, hatch="///", edgecolor="white",
                      label="launches, messages (predicted)" if first else None)  # fmt: skip
            axes.plot(rounds, [row] * len(rounds), "o", markerfacecolor="none", color="black",
                      markersize=8, label="a round (measured)" if first else None)  # fmt: skip
        axes.set_yticks(range(len(steps)), list(steps))
        axes.set_ylim(len(steps) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds of a step")
        axes.grid(visible=False, axis="y")
        axes.set_title(title)
        figure.legend(loc="outside lower left", ncols=3)
        print_evidence(figure, [Evidence.PREDICTED, Evidence.MEASURED])
    return figure


check_public(globals())
