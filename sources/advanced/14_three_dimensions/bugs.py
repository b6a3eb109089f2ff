"""Runs with planted bugs against one process: losses by step, and the first norm by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["draw_bugs"]

WRONG, HARDLY, RIGHT = "#bd1f01", "#f3c9c1", "white"  # petroff10 (Petroff 2021, arXiv:2107.02270)
NEAR = 1e-9  # float64 leaves 1e-15
SEEN = 1e-5  # what differs by less, nobody would see in a log
Run = tuple[Sequence[float], Sequence[float]]  # losses and norms


def draw_bugs(
    ranks: Sequence[Mapping[str, Run]],
    references: Mapping[str, Run],
    *,
    evidence: Evidence = Evidence.MEASURED,
    title: str = "",
) -> Figure:
    """A row for each run: how far its losses are from one process's, and the norm on every rank.

    Args:
        ranks: of each rank, by the name of a run, its losses and norms, step by step.
        references: by the same names, those of one process.
        evidence: of both.
        title: of the figure.

    Raises:
        ValueError: nothing to draw, or other runs on a rank than in `references`.
    """
    if not ranks or not references or any(rank.keys() != references.keys() for rank in ranks):
        raise ValueError(
            "draw_bugs() takes the same runs of each rank and of one process; got "
            f"{[[*rank] for rank in ranks]} and {[*references]}."
        )
    losses: dict[str, list[float]] = {}
    norms: dict[str, list[float]] = {}
    for name, (right, right_norms) in references.items():
        losses[name] = [a - b for a, b in zip(ranks[0][name][0], right, strict=True)]
        norms[name] = [rank[name][1][0] / right_norms[0] for rank in ranks]
    steps = max(map(len, losses.values()))
    with course_style():
        figure = Figure(figsize=(10.5, 1.7 + 0.42 * len(losses)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1.5 * steps, len(ranks)])
        for row, name in enumerate(losses):
            for column, apart in enumerate(losses[name]):
                _cell(
                    left,
                    row,
                    column,
                    f"{abs(apart):.0e}" if apart else "0",
                    apart,
                )
            for column, ratio in enumerate(norms[name]):
                _cell(right, row, column, f"{ratio:.2f}", ratio - 1)
        _finish(left, len(losses), [str(n + 1) for n in range(steps)])
        _finish(right, len(losses), [str(n) for n in range(len(ranks))])
        left.set_yticks(range(len(losses)), list(losses))
        right.set_yticks([])
        left.set_xlabel("step")
        right.set_xlabel("rank")
        left.set_title("loss difference, nats", fontsize=11, fontweight="normal")
        right.set_title("norm of step 1 / that of one process", fontsize=11, fontweight="normal")
        figure.suptitle(f"{title} (red: further than {SEEN:.0e} apart; pale: {NEAR:.0e})", x=0.01, ha="left",
                        fontweight="bold")  # fmt: skip
        print_evidence(figure, [evidence])
    return figure


def _cell(axes: Axes, row: int, column: int, text: str, apart: float) -> None:
    wrong = abs(apart) > SEEN
    color = WRONG if wrong else HARDLY if abs(apart) > NEAR else RIGHT
    box = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="#717581", lw=0.8)
    axes.add_patch(box)
    look = ("white", "bold") if wrong else ("black", "normal")
    axes.text(
        column, row, text, ha="center", va="center", fontsize=10, color=look[0], fontweight=look[1]
    )


def _finish(axes: Axes, rows: int, columns: Sequence[str]) -> None:
    axes.set_xticks(range(len(columns)), columns)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.grid(False)


check_public(globals())
