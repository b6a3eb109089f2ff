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
    """Bars of parameters in units of 1e9, by model: (held, used for one token)."""
    with course_style():
        figure, axes = empty_figure(height=1.4 + 0.7 * len(models))
        for row, (held, used) in enumerate(models.values()):
            axes.barh(row - 0.18, held, height=0.34, color=_HELD, label="" if row else "held: parameters, gradients and states follow it")
            axes.barh(row + 0.18, used, height=0.34, color=_USED, hatch="//", edgecolor="white", label="" if row else "used for one token: arithmetic follows it")
            axes.text(held, row - 0.18, f" {held:,.1f}", va="center", fontsize=10)
            axes.text(used, row + 0.18, f" {used:,.1f}", va="center", fontsize=10)
        axes.set_yticks(range(len(models)), list(models))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(1, 3 * max(held for held, _ in models.values()))
        axes.set_xlabel("parameters, in units of 10⁹ (a logarithmic axis)")
        axes.set_title("A token uses a part of the model; memory holds all of it")
        axes.grid(False, axis="y")
        figure.legend(loc="outside lower center", ncols=1, fontsize=10)
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def draw_exchange(rows: Tensor) -> Figure:
    """Rows that each rank (down) sends to each rank (across): whole numbers, (ranks, ranks)."""
    ranks = len(rows)
    with course_style():
        figure, axes = empty_figure(height=4.2)
        axes.imshow(rows, cmap="Blues", vmin=0, vmax=1.3 * int(rows.max()))
        for source in range(ranks):
            for target in range(ranks):
                stays = "\n(stays)" if source == target else ""
                axes.text(target, source, f"{int(rows[source, target])}{stays}", ha="center", va="center", fontsize=10)
        got = rows.sum(0).tolist()
        axes.set_xticks(range(ranks), [f"to rank {r}\n{got[r]} in all" for r in range(ranks)])
        axes.set_yticks(range(ranks), [f"from rank {r}" for r in range(ranks)])
        axes.grid(False)
        axes.set_title("One exchange: every rank sends as many rows,\nand gets as many as its experts are asked for")
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
        axes.text(1, 1.04, "even", fontsize=9)
        axes.set_ylim(0.8)
        axes.set_xlabel("step (mean of five)")
        axes.set_ylabel("busiest expert's rows / mean")
        axes.set_title("Left alone, one of eight experts takes three times its share")
        figure.legend(loc="outside lower center", ncols=3, fontsize=10)
        print_evidence(figure, [Evidence.MEASURED])
    return figure
