"""Who gets the signal that Slurm sends before a job's time is over, and what it does there."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from utils.checked import check_public
from utils.views.style import course_style

GETS, SPARED, DIES = "#dcebf8", "#ffffff", "#fbe3cf"
WIDTH, HEIGHT = 3.1, 0.95
# Boxes: left, bottom, width, fill, text. In columns: the script, a rank as srun's task, a torchrun as srun's task.
_BOXES = (
    (3.5, 4.0, 7.2, SPARED, "Slurm, 120 to 180 s before the job's time limit"),
    (0.0, 1.8, WIDTH, SPARED, "job.slurm, the batch shell:\ngets none (B:USR1 would\ngo here alone)"),
    (3.7, 1.8, WIDTH, GETS, "python train.py, a rank:\nnotes it, saves after the step,\nends with 75"),
    (7.4, 1.8, WIDTH, DIES, "torchrun:\nhas no handler for it, dies;\nsrun ends with 138, not 75"),
    (7.4, 0.2, WIDTH, SPARED, "python train.py, its rank:\nby Slurm's default hears nothing\nand ends without a save"),
)  # fmt: skip
_TASKS = ((3.5, 1.6, 3.5, 1.65), (7.2, 0.0, 3.5, 3.25))  # left, bottom, width, height


def draw_signal() -> Figure:
    """A drawing of no run: the batch shell, a rank that is srun's task, and a torchrun in between."""
    with course_style():
        figure = Figure(figsize=(9.0, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for x, y, width, height in _TASKS:
            frame = Rectangle(
                (x, y), width, height, facecolor="none", edgecolor="#555555", linestyle="--"
            )
            axes.add_patch(frame)
            axes.text(x + 0.1, y + height - 0.07, "a task of srun", ha="left", va="top", fontsize=9)
            _arrow(axes, (x + width / 2, 3.95), (x + width / 2, y + height))
        for x, y, width, color, words in _BOXES:
            _box(axes, x, y, width, color, words)
        axes.set_xlim(-0.2, 10.9)
        axes.set_ylim(-0.1, 5.1)
        axes.set_axis_off()
        axes.set_title("Slurm's default: the first process of each task gets USR1 (a drawing)")
    return figure


def _box(axes: Axes, x: float, y: float, width: float, color: str, words: str) -> None:
    style = "round,pad=0.05"
    place = (x, y)
    box = FancyBboxPatch(
        place, width, HEIGHT, style, linewidth=0.9, facecolor=color, edgecolor="black"
    )
    axes.add_patch(box)
    axes.text(x + width / 2, y + HEIGHT / 2, words, ha="center", va="center", fontsize=9)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color="black"))
    axes.text(end[0] + 0.15, (start[1] + end[1]) / 2, "USR1", fontsize=9, ha="left", va="center")


__all__ = ["draw_signal"]

check_public(globals())
