"""The map of verdicts: a row for each model and method, a column for each card."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from utils.catalog import device
from utils.checked import check_public
from utils.fitting.verdict import MARGIN, usable_bytes
from utils.units import GIB
from utils.views.style import Look, course_style

from .decisions import Answer, Square

__all__ = ["draw_decisions"]

LOOKS = {
    Answer.FITS: Look("#c9e2f5"),
    Answer.CURE: Look("#f5efd6", "//"),
    Answer.CARDS: Look("#f3d2c8", "xx"),
    Answer.NONE: Look("#c9c9c9", "||"),
}
# A change that changes the numbers of training: fewer bits for weights or moments.
CHANGED = Look("#d9b65c", "\\\\\\")
LEGEND = (
    (LOOKS[Answer.FITS], "fits as asked (simulated)"),
    (LOOKS[Answer.CURE], "fits with a change, the same numbers (simulated)"),
    (CHANGED, "fits with fewer bits, other numbers (simulated)"),
    (LOOKS[Answer.CARDS], "several cards, all blocks recomputed (predicted)"),
)
SECONDS = "Card-seconds: of 1,000 tokens, all cards together (predicted; of a T4 there are none)."
BAR = (
    "Bar: what a card then holds, of its usable memory. Line in it: what must not be passed, "
    f"to leave {MARGIN:.0%} of the need free."
)
UNPROVEN = "† Memory alone: we know of no PyTorch library that trains 4-bit weights so."
HATCH_COLOR = "#b5aea6"
WIDE = 36  # characters of a line within a square


def draw_decisions(squares: Sequence[Square], title: str) -> Figure:
    """A square for each model, method and card: the verdict in a word, what it takes, and how full a card is.

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
            figsize=(3.0 * len(columns) + 1.8, 1.15 * len(rows) + 2.6), layout="constrained"
        )
        axes = figure.subplots()
        for y, row in enumerate(rows):
            for x, card in enumerate(columns):
                _draw_square(axes, x, y, found[(*row, card)])
        _label(axes, rows, columns)
        axes.set_title(title, fontsize=13, pad=34)
        _explain(figure, squares)
    return figure


def _explain(figure: Figure, squares: Sequence[Square]) -> None:
    """The legend, below: what colours, bars and the dagger mean."""
    seen = {_look(square) for square in squares}
    boxes: list[Patch] = [
        Patch(facecolor=look.color, hatch=look.hatch, label=label)
        for look, label in LEGEND
        if look in seen
    ]
    if any(square.is_unproven for square in squares):
        boxes.append(Patch(facecolor="none", label=UNPROVEN))
    boxes += [Patch(facecolor="none", label=label) for label in (SECONDS, BAR)]
    figure.legend(handles=boxes, loc="outside lower center", ncols=1, fontsize=10, frameon=False)


def _draw_square(axes: Axes, x: int, y: int, square: Square) -> None:
    look = _look(square)
    axes.add_patch(
        Rectangle(
            (x - 0.49, y - 0.48), 0.98, 0.96, facecolor=look.color, hatch=look.hatch,
            linewidth=0,
        )
    )  # fmt: skip
    word = f"{square.cards} cards" if square.answer is Answer.CARDS else str(square.answer)
    word += "" if square.is_exact else ": other numbers"
    word += " †" if square.is_unproven else ""
    how = textwrap.shorten(square.how.partition(",")[0], 2 * WIDE, placeholder=" ...")
    behind = {"boxstyle": "round,pad=0.12", "facecolor": look.color, "edgecolor": "none"}
    text = {"ha": "center", "va": "center", "linespacing": 1.15, "bbox": behind}
    axes.text(x, y - 0.32, word, fontsize=11.5, fontweight="bold", **text)
    lines = [*textwrap.wrap(how, WIDE), *_numbers(square)]
    axes.text(x, y + 0.05, "\n".join(lines), fontsize=9, **text)
    _draw_bar(axes, x, y + 0.39, square)


def _look(square: Square) -> Look:
    return LOOKS[square.answer] if square.is_exact else CHANGED


def _numbers(square: Square) -> list[str]:
    """What a square says below its change: GiB, texts and time."""
    held = f"{square.gib} a card" if square.cards > 1 else square.gib
    if square.answer is Answer.CURE and square.asked:
        held = f"{square.asked.needed_bytes / GIB:.1f} -> {square.gib}"
    texts = f", {square.texts} texts a step" if square.texts > 1 else ""
    seconds = square.card_seconds
    return [held + texts, *([f"{seconds:.2g} card-seconds"] if seconds else [])]


def _draw_bar(axes: Axes, x: float, y: float, square: Square) -> None:
    """What a card then holds, of what it has; a line where the margin begins."""
    left, width, height = x - 0.42, 0.84, 0.09
    share = min(1.0, square.needed_bytes / usable_bytes(square.card))
    axes.barh(y, width, height, left=left, facecolor="white", edgecolor="#333333", linewidth=0.8)
    axes.barh(y, width * share, height, left=left, facecolor="#4d5a66")
    limit = left + width / (1 + MARGIN)
    axes.plot([limit, limit], [y - 0.075, y + 0.075], color="black", linewidth=1.6)


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
