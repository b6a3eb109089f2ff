"""A step's seconds over the chunks of a rank, for messages that are hidden and that are waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from utils.checked import check_public
from utils.units import Evidence
from utils.views.style import course_style, print_evidence

__all__ = ["draw_chunks"]

# Of the arms in their order: colour, line and mark, so that none is told by its colour alone.
ARMS = [("#3f90da", "-", "o"), ("#717581", ":", "^"), ("#ffa90e", "-", "s"), ("#bd1f01", "--", "D")]


def draw_chunks(
    steps: Mapping[int, Mapping[str, Sequence[float]]],
    chunks: Sequence[int],
    published: Mapping[int, tuple[int, float]],
    *,
    title: str,
) -> Figure:
    """A panel a batch: a line an arm over the chunks of a rank, and a star where a run is published.

    Args:
        steps: seconds by sequences of a batch, then by arm, one for each of `chunks`.
        chunks: on each rank, v.
        published: by sequences of a batch, the chunks and seconds of a published run.
        title: of the figure.
    """
    with course_style():
        figure = Figure(figsize=(10, 4.0), layout="constrained")
        every = figure.subplots(1, len(steps), squeeze=False)[0]
        places = range(len(chunks))
        for axes, (sequences, arms) in zip(every, steps.items(), strict=True):
            for (name, seconds), (color, line, mark) in zip(arms.items(), ARMS, strict=True):
                axes.plot(places, seconds, line, marker=mark, color=color, label=name)
            if sequences in published:
                v, seconds = published[sequences]
                axes.plot(chunks.index(v), seconds, "*", markersize=15, color="black", zorder=4,
                          label="published run, which set the constants")  # fmt: skip
            axes.set_xticks(places, [str(v) for v in chunks])
            axes.set_xlabel("chunks on each rank, v")
            axes.set_title(f"{sequences} sequences", fontsize=11)
        every[0].set_ylabel("seconds of a step (not from 0)")
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle(title, fontsize=12)
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


check_public(globals())
