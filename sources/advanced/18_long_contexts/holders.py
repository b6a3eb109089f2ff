"""Pictures of lesson 18: which rank holds which piece of a sequence, what it computes, and what moves."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from utils.checked import check_public
from utils.views.style import course_style

from .ring import places

__all__ = ["draw_exchange", "draw_holders"]

RANKS = 4
PIECES = 2 * RANKS
# A rank's look; in grey its hatch tells it apart, and its number stands beside it.
_LOOKS = [("#92dadd", ""), ("#ffa90e", "//"), ("#b9ac70", ".."), ("#c9c9c9", "xx")]


def draw_holders() -> Figure:
    """Four ranks, eight pieces: causal attention by owner and round, in order and zigzag; zigzag's moves below."""
    with course_style():
        figure = Figure(figsize=(10.5, 11.0), layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(1.45, 1, 0.34))
        for column, (name, zigzag) in enumerate({"in order": False, "zigzag": True}.items()):
            _draw_square(figure.add_subplot(grid[0, column]), name, zigzag)
        _draw_rounds(figure.add_subplot(grid[1, :]))
        _draw_way_home(figure.add_subplot(grid[2, :]))
    return figure


def held(rank: int, zigzag: bool) -> list[int]:
    """The pieces of a rank, by their numbers."""
    return places(PIECES, rank, RANKS, zigzag).tolist()


def _draw_square(axes: Axes, name: str, zigzag: bool) -> None:
    owner = {piece: rank for rank in range(RANKS) for piece in held(rank, zigzag)}
    work = [0.0] * RANKS
    for row in range(PIECES):
        color, hatch = _LOOKS[owner[row]]
        for column in range(row + 1):
            corners = [(column, row), (column, row + 1), (column + 1, row + 1), (column + 1, row)]
            shown = corners[:3] if row == column else corners
            axes.add_patch(Polygon(shown, facecolor=color, hatch=hatch, edgecolor="white", lw=1.5))
            x, y = (column + 0.3, row + 0.7) if row == column else (column + 0.5, row + 0.5)
            turn = (owner[row] - owner[column]) % RANKS
            axes.text(x, y, str(turn), ha="center", va="center", fontsize=10, bbox=_PLATE)
            work[owner[row]] += 0.5 if row == column else 1
    axes.set(xlim=(0, PIECES), ylim=(PIECES, 0), aspect="equal")
    middles = [piece + 0.5 for piece in range(PIECES)]
    axes.set_xticks(middles, [str(piece) for piece in range(PIECES)])
    axes.set_yticks(middles, [f"{piece}: rank {owner[piece]}" for piece in range(PIECES)])
    axes.grid(False)
    axes.tick_params(length=0)
    squares = ", ".join(f"{each:.0f}" for each in work)
    axes.set(
        title=f"{name}: squares by rank {squares}",
        xlabel="piece of the KV (in a square: the round)",
        ylabel="piece of the queries, and who holds it",
    )


def _draw_rounds(axes: Axes) -> None:
    wide, high = 0.78, 0.62
    for turn in range(RANKS):
        for rank in range(RANKS):
            source = (rank - turn) % RANKS
            color, hatch = _LOOKS[source]
            x, y = rank - wide / 2, turn - high / 2
            axes.add_patch(Rectangle((x, y), wide, high, facecolor=color, hatch=hatch, edgecolor="white"))  # fmt: skip
            axes.add_patch(Rectangle((x, y), wide, high, fill=False, edgecolor="#555555"))
            pieces = ", ".join(map(str, held(source, zigzag=True)))
            told = f"KV {pieces}\n{_seen(rank, source)}"
            axes.text(rank, turn, told, ha="center", va="center", fontsize=9.5, bbox=_PLATE)
            if turn < RANKS - 1:
                _arrow(axes, (rank + wide / 2, turn + high / 2), (rank + 1 - wide / 2, turn + 1 - high / 2))  # fmt: skip
        if turn:
            _arrow(axes, (-1 + wide / 2, turn - 1 + high / 2), (-wide / 2, turn - high / 2))
    names = [
        f"rank {rank}\nqueries {', '.join(map(str, held(rank, True)))}" for rank in range(RANKS)
    ]
    axes.set_xticks(range(RANKS), names)
    axes.set_yticks(range(RANKS), [f"round {turn}" for turn in range(RANKS)])
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.85, RANKS - 0.15), ylim=(RANKS - 0.5, -0.5))
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(
        "zigzag, by pieces: keys and values (KV) move on, queries stay; right of rank 3 is rank 0"
    )


def _draw_way_home(axes: Axes) -> None:
    """Backward: rank 0's gradients get a term wherever queries see their keys, and one move more brings them home."""
    wide, high = 0.78, 0.62
    color, hatch = _LOOKS[0]
    pieces = held(0, zigzag=True)
    keys = ", ".join(map(str, pieces))
    for turn in range(RANKS + 1):
        x, y = turn - wide / 2, -high / 2
        axes.add_patch(Rectangle((x, y), wide, high, facecolor=color, hatch=hatch, edgecolor="white"))  # fmt: skip
        axes.add_patch(Rectangle((x, y), wide, high, fill=False, edgecolor="#555555"))
        home = turn == RANKS
        visited = range(min(turn + 1, RANKS))
        met = {p: sum(max(held(rank, zigzag=True)) >= p for rank in visited) for p in pieces}
        terms = [f"piece {p}: {n} term{'s' * (n > 1)}" for p, n in met.items()]
        axes.text(turn, 0, "\n".join(terms), ha="center", va="center", fontsize=9.5, bbox=_PLATE)  # fmt: skip
        if not home:
            _arrow(axes, (turn + wide / 2, 0), (turn + 1 - wide / 2, 0))
    names = [f"round {turn}\nrank {turn}" for turn in range(RANKS)]
    axes.set_xticks(range(RANKS + 1), [*names, "home\nrank 0"])
    axes.xaxis.tick_top()
    axes.set_yticks([])
    axes.set(xlim=(-0.85, RANKS + 0.5), ylim=(0.5, -0.5))
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(f"backward: the gradient of KV {keys} travels with them, and moves once more")


def _seen(rank: int, source: int) -> str:
    mine, theirs = held(rank, zigzag=True), held(source, zigzag=True)
    if rank == source:
        return "its own: triangle"
    if source < rank:
        return f"{mine[0]}, {mine[1]} see {theirs[0]}"
    return f"{mine[1]} sees {theirs[0]}, {theirs[1]}"


def draw_exchange() -> Figure:
    """Ulysses: tokens by heads, who holds each part before and while it attends; in a square, who sends to whom."""
    with course_style():
        figure = Figure(figsize=(10.5, 4.9), layout="constrained")
        before, middle, after = figure.subplots(1, 3, width_ratios=(3, 1, 3))
        for token in range(RANKS):
            for head in range(RANKS):
                for axes, holder in ((before, token), (after, head)):
                    color, hatch = _LOOKS[holder]
                    axes.add_patch(Rectangle((head, token), 1, 1, facecolor=color, hatch=hatch, edgecolor="white", lw=1.5))  # fmt: skip
                moves = f"to {head}" if token != head else "stays"
                before.text(head + 0.5, token + 0.5, moves, ha="center", va="center", fontsize=10, bbox=_PLATE)  # fmt: skip
                came = f"from {token}" if token != head else "stayed"
                after.text(head + 0.5, token + 0.5, came, ha="center", va="center", fontsize=10, bbox=_PLATE)  # fmt: skip
        for axes in (before, after):
            axes.set(xlim=(0, RANKS), ylim=(RANKS, 0), aspect="equal")
            axes.grid(False)
            axes.tick_params(length=0)
        middles = [place + 0.5 for place in range(RANKS)]
        pairs = [f"{2 * part}, {2 * part + 1}" for part in range(RANKS)]
        before.set_yticks(middles, [f"{pair}: rank {r}" for r, pair in enumerate(pairs)])
        after.set_yticks(middles, pairs)
        named = [f"query {head},\nKV {head // 2}" for head in range(RANKS)]
        before.set_xticks(middles, named)
        after.set_xticks(middles, [f"{name}:\nrank {rank}" for rank, name in enumerate(named)])
        before.set(title="before: a row is a rank", ylabel="pieces of the sequence")
        after.set(title="attending: a column is a rank", ylabel="pieces of the sequence")
        for axes in (before, after):
            axes.set_xlabel("heads (two KV heads, copied)")
        middle.axis("off")
        middle.set(xlim=(0, 1), ylim=(0, 1))
        for height, ends, told in ((0.62, (0, 1), "all-to-all\nof q, k, v"), (0.32, (1, 0), "all-to-all\nof the output")):  # fmt: skip
            _arrow(middle, (ends[0], height), (ends[1], height))
            middle.text(0.5, height + 0.03, told, ha="center", va="bottom", fontsize=10)
    return figure


_PLATE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#333333", lw=1.2)
    )


check_public(globals())
