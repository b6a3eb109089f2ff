"""The pictures of lesson 19."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from utils.units import Evidence
from utils.views.style import course_style, empty_figure, print_evidence

_HELD, _USED = "#832db6", "#ffa90e"
_WAYS = (("#4d4d4d", "-"), ("#3f90da", "--"), ("#bd1f01", "-"))


def draw_held_and_used(models: Mapping[str, tuple[float, float]]) -> Figure:
    """Bars of parameters by model, as a share of what is held: (held, used for one token), in units of 1e9."""
    with course_style():
        figure, axes = empty_figure(height=1.2 + 0.75 * len(models))
        for row, (held, used) in enumerate(models.values()):
            share = 100 * used / held
            axes.barh(
                row,
                100,
                height=0.6,
                color=_HELD,
                label="" if row else "held, not used for it: states follow all",
            )
            axes.barh(
                row,
                share,
                height=0.6,
                color=_USED,
                hatch="//",
                edgecolor="white",
                label="" if row else "used for a token: arithmetic follows it",
            )
            axes.text(101, row, f"{used:,.1f} of {held:,.1f} billion", va="center", fontsize=10)
        axes.set_yticks(range(len(models)), list(models))
        axes.invert_yaxis()
        axes.set_xlim(0, 130)
        axes.set_xticks(range(0, 101, 20))
        axes.set_xlabel("% of the model's parameters")
        axes.set_title("A token uses a part of the parameters; states follow all of them")
        axes.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def draw_exchange(rows: Tensor) -> Figure:
    """Rows that each rank (down) sends to each rank (across): whole numbers, (ranks, ranks)."""
    ranks, got = len(rows), rows.sum(0).tolist()
    with course_style():
        figure, axes = empty_figure(width=7.5, height=3.6)
        axes.imshow(rows, cmap="Blues", vmin=0, vmax=2 * int(rows.max()), aspect="auto")
        for source in range(ranks):
            for target in range(ranks):
                stays = " (stays)" if source == target else ""
                axes.text(
                    target, source, f"{int(rows[source, target])}{stays}", ha="center", va="center"
                )
        axes.set_xticks(
            range(ranks), [f"to rank {r}\n{got[r]} in all" for r in range(ranks)], fontsize=10
        )
        axes.set_yticks(range(ranks), [f"from rank {r}" for r in range(ranks)], fontsize=10)
        axes.grid(False)
        axes.set_title(
            "128 tokens a rank, two experts each, two experts on a rank:\nall send 256 rows, and get what their experts are chosen for"
        )
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def draw_load(loads: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """The busiest expert's rows over the mean, by step: a thick line the mean of seeds, a band their range."""
    with course_style():
        figure, axes = empty_figure(height=4.0)
        for (way, runs), (color, line) in zip(loads.items(), _WAYS, strict=True):
            smooth = torch.tensor(runs).unfold(1, 5, 1).mean(-1)
            steps = range(5, 5 + smooth.shape[1])
            axes.plot(steps, smooth.mean(0), line, color=color, lw=2, label=way)
            axes.fill_between(steps, smooth.amin(0), smooth.amax(0), color=color, alpha=0.15)
        axes.axhline(1, color="black", lw=0.8, ls=":")
        axes.text(1, 1.05, "even", fontsize=9)
        axes.axhline(4, color="black", lw=0.8, ls=":")
        axes.text(1, 4.05, "every token chooses it", fontsize=9)
        axes.set_ylim(0.8, 4.3)
        axes.set_xlabel("step (mean of five)")
        axes.set_ylabel("busiest expert's rows / mean")
        axes.set_title("Left alone, the busiest of 8 experts takes over 3 times its share (k = 2)")
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.MEASURED])
    return figure
