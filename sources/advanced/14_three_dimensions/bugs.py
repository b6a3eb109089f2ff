"""Runs with planted bugs against one process: losses over the steps, and the first norm by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import Evidence
from utils.views.curves import draw_losses
from utils.views.style import course_style

__all__ = ["draw_bugs"]

# petroff10 (Petroff 2021, arXiv:2107.02270); lines differ in style and marker, bars in hatch.
_COLORS = ("#3f90da", "#bd1f01", "#ffa90e", "#832db6", "#4d4d4d", "#92dadd")
_LINES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("-", "x"), ("--", "+"))
_STAGES = (("first stage", "#3f90da", ""), ("last stage", "#ffa90e", "//"))


def draw_bugs(
    losses: Mapping[str, Sequence[float]],
    norms: Mapping[str, Sequence[float]],
    *,
    evidence: Evidence = Evidence.MEASURED,
    title: str = "",
) -> Figure:
    """Draw losses less those of one process, and the norm of step 1 over that of one process.

    Args:
        losses: by the name of a run, the differences in nats, step by step.
        norms: by the same names, the ratio on the first stage and on the last.
        evidence: of both.
        title: of the figure.

    Raises:
        ValueError: nothing to draw, or a run that has not both.
    """
    if not losses or losses.keys() != norms.keys():
        raise ValueError(
            f"draw_bugs() takes losses and norms of the same runs; got {[*losses]} and {[*norms]}."
        )
    one = {"one process": [0.0] * max(map(len, losses.values()))}
    with course_style():
        figure = draw_losses(
            {**one, **losses}, minus="one process", evidence=evidence, title="Loss", unit="nats"
        )
        figure.set_size_inches(10.5, 4.6)
        (left,), grid = figure.axes, figure.add_gridspec(1, 2)
        left.set_subplotspec(grid[0])
        if legend := left.get_legend():
            legend.remove()
        for number, line in enumerate(left.lines[: len(losses)]):
            style, marker = _LINES[number % len(_LINES)]
            line.set(linestyle=style, marker=marker, color=_COLORS[number % len(_COLORS)], lw=1.8)
            line.set_markersize(5)
        right = figure.add_subplot(grid[1])
        for number, (label, color, hatch) in enumerate(_STAGES):
            rows = [row + 0.36 * number - 0.18 for row in range(len(norms))]
            sizes = [ratio[number] for ratio in norms.values()]
            right.barh(rows, sizes, height=0.34, color=color, hatch=hatch, label=label)
            for row, size in zip(rows, sizes, strict=True):
                right.annotate(
                    f"{size:.2f}",
                    (size, row),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                )
        right.axvline(1, color="black", lw=1)
        right.set_yticks(range(len(norms)), list(norms))
        right.set_ylim(len(norms) - 0.5, -0.5)
        right.set_xlim(0, 1.2 * max(1.0, *(max(ratio) for ratio in norms.values())))
        right.grid(False, axis="y")
        right.set_xlabel("norm of step 1 / that of one process")
        right.set_title("Norm", loc="left")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=9
        )
        right.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=9, frameon=False)
    return figure


check_public(globals())
