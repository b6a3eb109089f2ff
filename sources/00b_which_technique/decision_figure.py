"""The map of verdicts: a row for each model and method, a column for each card."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from utils.catalog import device
from utils.checked import check_public
from utils.fitting.verdict import usable_bytes
from utils.units import GIB
from utils.views.style import Look, course_style, print_evidence

from .decisions import Answer, Square

__all__ = ["draw_decisions"]

LOOKS = {
    Answer.FITS: Look("#c9e2f5"),
    Answer.CURE: Look("#f5efd6", "//"),
    Answer.CARDS: Look("#f3d2c8", "xx"),
    Answer.NONE: Look("#c9c9c9", "||"),
}
# A cure that changes the numbers of training: fewer bits for weights or moments.
CHANGED = Look("#ecd9a0", "\\\\\\")
HATCH_COLOR = "#b5aea6"
WIDE = 33  # characters of a line within a square


def draw_decisions(squares: Sequence[Square], title: str) -> Figure:
    """A square for each model, method and card: the verdict in a word, what it takes, and the GiB of a card.

    Args:
        squares: As `decide` gives them; each model, method and card of them once.
        title: What the figure is called.

    Raises:
        ValueError: a square is missing.
    """
    rows = list(dict.fromkeys((square.model, square.method) for square in squares))
    columns = list(dict.fromkeys(square.card for square in squares))
    found = {(square.model, square.method, square.card): square for square in squares}
    if missing := [(*row, card) for row in rows for card in columns if (*row, card) not in found]:
        raise ValueError(f"No verdict for {missing[0]}: give draw_decisions a square for each.")
    with course_style(), rc_context({"hatch.color": HATCH_COLOR}):
        figure = Figure(
            figsize=(2.7 * len(columns) + 1.8, 0.85 * len(rows) + 1.4), layout="constrained"
        )
        axes = figure.subplots()
        for y, row in enumerate(rows):
            for x, card in enumerate(columns):
                _draw_square(axes, x, y, found[(*row, card)])
        _label(axes, rows, columns)
        axes.set_title(title, fontsize=13, pad=34)
        print_evidence(figure, [square.evidence for square in squares])
    return figure


def _draw_square(axes: Axes, x: int, y: int, square: Square) -> None:
    look = LOOKS[square.answer] if square.is_exact else CHANGED
    axes.add_patch(
        Rectangle(
            (x - 0.49, y - 0.48), 0.98, 0.96, facecolor=look.color, hatch=look.hatch,
            linewidth=0,
        )
    )  # fmt: skip
    word = f"{square.cards} cards" if square.answer is Answer.CARDS else str(square.answer)
    word += "" if square.is_exact else ": other numbers"
    how = textwrap.shorten(square.how.partition(",")[0], 2 * WIDE, placeholder=" ...")
    held = square.gib + " a card" * (square.cards > 1)
    texts = f", {square.texts} texts a step" if square.texts > 1 else ""
    lines = [*textwrap.wrap(how, WIDE), held + texts]
    behind = {"boxstyle": "round,pad=0.15", "facecolor": look.color, "edgecolor": "none"}
    text = {"ha": "center", "va": "center", "linespacing": 1.1, "bbox": behind}
    axes.text(x, y - 0.28, word, fontsize=11, fontweight="bold", **text)
    axes.text(x, y + 0.14, "\n".join(lines), fontsize=8.5, **text)


def _label(axes: Axes, rows: Sequence[tuple[str, str]], columns: Sequence[str]) -> None:
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    cards = [
        f"{device(card).memory_gb} GB {card}\n{usable_bytes(card) / GIB:.1f} GiB usable"
        for card in columns
    ]
    axes.set_xticks(range(len(columns)), cards)
    ways = [f"{model.rpartition('/')[2]}\n{method}" for model, method in rows]
    axes.set_yticks(range(len(rows)), ways)
    axes.tick_params(
        axis="both", length=0, labelsize=10, top=False, labeltop=True, labelbottom=False
    )
    axes.grid(False)
    for edge in axes.spines.values():
        edge.set_visible(False)
    models = [model for model, _ in rows]
    for y in (y for y in range(1, len(rows)) if models[y] != models[y - 1]):
        axes.axhline(y - 0.5, color="#333333", linewidth=1.2)


check_public(globals())
