"""Who holds what when the optimizer is offloaded, and what crosses the link, in the order of a step."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from utils.units import GB, Category, Evidence
from utils.views.style import LOOKS, course_style, print_evidence

__all__ = ["draw_flow"]

CARD, HOST, CPU = (0.2, 3.2), (5.7, 3.2), (10.2, 3.0)  # left edge and width of each box
TOP, BOTTOM = 4.6, 0.2


def draw_flow(parameters: float, *, model: str) -> Figure:
    """Three places with what they hold, and numbered arrows with the bytes that each sends.

    Args:
        parameters: of the model, all of them trained in bf16 with AdamW.
        model: its name, for the title.
    """
    two, four = (f"{each * parameters / GB:.1f} GB" for each in (2, 4))
    with course_style():
        figure = Figure(figsize=(10.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.set_xlim(0, 13.4)
        axes.set_ylim(-0.1, 5.4)
        axes.axis("off")
        _draw_place(axes, CARD, "the card")
        _draw_place(axes, HOST, "host memory")
        _draw_place(axes, CPU, "CPU")
        _draw_held(axes, CARD, 3.3, Category.PARAMETERS, f"weights, bf16\n{two}")
        _draw_held(axes, CARD, 1.3, Category.ACTIVATIONS, "activations")
        _draw_held(axes, HOST, 3.3, Category.GRADIENTS, f"gradients, fp32\n{four}")
        state = f"master copy, two\nmoments, fp32: {12 * parameters / GB:.1f} GB"
        _draw_held(axes, HOST, 1.3, Category.OPTIMIZER_STATE, state)
        _draw_arrow(axes, (3.5, 5.6), 3.7, f"1  in backward:\ngradients, {two}")
        _draw_arrow(axes, (5.6, 3.5), 1.5, f"3  once stepped:\nweights, {two}")
        _draw_arrow(axes, (9.0, 10.1), 2.6, "", both=True)
        middle = CPU[0] + CPU[1] / 2
        axes.text(middle, 2.6, "2  the step:\nAdamW", ha="center", va="center", fontsize=11)
        axes.text(4.55, 4.9, "the link (PCIe)", ha="center", fontsize=10, style="italic")
        title = f"{model}: the optimizer and the gradients are offloaded"
        figure.suptitle(title, fontsize=13, fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED], [])
    return figure


def _draw_place(axes: Axes, place: tuple[float, float], name: str) -> None:
    left, width = place
    box = FancyBboxPatch(
        (left, BOTTOM), width, TOP - BOTTOM, boxstyle="round,pad=0.08", fill=False, lw=1.4
    )
    axes.add_patch(box)
    axes.text(left + width / 2, TOP + 0.25, name, ha="center", fontsize=12, fontweight="bold")


def _draw_held(
    axes: Axes, place: tuple[float, float], height: float, category: Category, text: str
) -> None:
    left, width = place
    look = LOOKS[category]
    axes.barh(height, width - 0.4, left=left + 0.2, height=1.35, color=look.color, hatch=look.hatch)
    white = {"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.9, "lw": 0}
    middle = left + width / 2
    axes.text(middle, height, text, ha="center", va="center", fontsize=10, bbox=white)


def _draw_arrow(
    axes: Axes, ends: tuple[float, float], height: float, text: str, *, both: bool = False
) -> None:
    start, end = ends
    how = {
        "arrowstyle": "<->" if both else "-|>",
        "lw": 2.2,
        "mutation_scale": 18,
        "color": "black",
    }
    axes.annotate("", (end, height), (start, height), arrowprops=how)
    axes.text((start + end) / 2, height + 0.15, text, ha="center", va="bottom", fontsize=9.5)
