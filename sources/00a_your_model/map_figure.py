"""Which batches fit a card: tokens of a sequence over micro-batch, a panel for each way to train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tqdm.auto import tqdm

from utils.fitting.recipe import Recipe
from utils.fitting.trials import Trials
from utils.fitting.verdict import MARGIN, FitVerdict
from utils.units import GIB
from utils.views.style import course_style, print_evidence, wrapped

FITS, CLOSE, TOO_MUCH = "#c9e2f5", "#f5efd6", "#f3d2c8"
Grid = dict[tuple[int, int], FitVerdict]


def map_of(
    trials: Trials, recipe: Recipe, tokens: Iterable[int], micro_batches: Iterable[int]
) -> Grid:
    """A verdict for each (tokens, micro-batch).

    With attention that keeps no scores, memory depends on tokens times micro-batch: each product is
    simulated once, as one long sequence.
    """
    sizes = [(length, count) for length in tokens for count in micro_batches]
    products = sorted({length * count for length, count in sizes})
    found = {
        total: trials.verdict(recipe.but(tokens=total, micro_batch=1))
        for total in tqdm(products, desc="mapping", leave=False)
    }
    return {(length, count): found[length * count] for length, count in sizes}


def longest_tokens(grid: Grid) -> str:
    """The most tokens of one micro-batch that fit with a margin, in words.

    Between two simulated sizes they are read off the line through both.
    """
    found = {length * count: verdict for (length, count), verdict in grid.items()}
    sizes = sorted(found)
    safe = [size for size in sizes if found[size].fits and not found[size].is_close]
    if not safe:
        return f"fewer than {sizes[0]:,} tokens"
    low = safe[-1]
    if low == sizes[-1]:
        return f"{low:,} tokens and perhaps more"
    high = sizes[sizes.index(low) + 1]
    most_bytes = found[low].usable_bytes / (1 + MARGIN)
    a_token = (found[high].needed_bytes - found[low].needed_bytes) / (high - low)
    most = low + (most_bytes - found[low].needed_bytes) / a_token
    return f"about {most:,.0f} tokens"


def draw_map(grids: Mapping[str, Grid], title: str) -> Figure:
    """What the card must hold, in GiB; a cross: too much, a tilde: closer than simulations are exact."""
    with course_style():
        figure = Figure(figsize=(3.3 * len(grids) + 0.6, 3.8), layout="constrained")
        panels = figure.subplots(1, len(grids), squeeze=False)[0]
        for axes, (name, grid) in zip(panels, grids.items(), strict=True):
            _draw_panel(axes, name, grid)
        panels[0].set_ylabel("tokens of a sequence")
        figure.suptitle(title)
        every = [verdict.measurement for grid in grids.values() for verdict in grid.values()]
        print_evidence(figure, [m.evidence for m in every], [m.device for m in every])
    return figure


def _draw_panel(axes: Axes, name: str, grid: Grid) -> None:
    lengths, counts = (sorted({size[i] for size in grid}) for i in (0, 1))
    for row, length in enumerate(lengths):
        for column, count in enumerate(counts):
            _draw_cell(axes, column, row, grid[length, count])
    axes.set(xlim=(-0.5, len(counts) - 0.5), ylim=(-0.5, len(lengths) - 0.5))
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_xlabel("micro-batch (sequences)")
    axes.set_title(wrapped(name), fontsize=10)
    axes.grid(False)


def _draw_cell(axes: Axes, column: int, row: int, verdict: FitVerdict) -> None:
    sign = "\n\N{MULTIPLICATION SIGN}" if not verdict.fits else "\n~" if verdict.is_close else ""
    color = TOO_MUCH if not verdict.fits else CLOSE if verdict.is_close else FITS
    axes.add_patch(
        Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=2)
    )
    text = f"{verdict.needed_bytes / GIB:.1f}{sign}"
    axes.text(column, row, text, ha="center", va="center", fontsize=11)
