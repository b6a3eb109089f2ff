"""Figures of quantization and serving: a grid, its price, memory over context, tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

MARKS = "osD^v"
WEIGHT_COLOR, CACHE_COLOR = "#3f90da", "#ffa90e"  # of the course's style


def draw_error_by_bits(
    errors: Mapping[str, Mapping[int, Sequence[float]]],
    *,
    device: str = "",
    title: str = "Error of the layer's output over the bits of its weights",
) -> Figure:
    """Relative errors by method and bits; the band spans the seeds, the line joins their middle.

    Raises:
        ValueError: no method, or a method without errors.
    """
    if not errors or not all(rows and all(rows.values()) for rows in errors.values()):
        raise ValueError("draw_error_by_bits() needs errors for every method and number of bits.")
    with course_style():
        figure, axes = empty_figure()
        for mark, (name, rows) in zip(MARKS, errors.items(), strict=False):
            bits = sorted(rows)
            middle = [sorted(rows[b])[len(rows[b]) // 2] for b in bits]
            (line,) = axes.plot(bits, middle, f"{mark}-", label=name)
            low, high = [min(rows[b]) for b in bits], [max(rows[b]) for b in bits]
            axes.fill_between(bits, low, high, alpha=0.2, color=line.get_color())
        axes.set_yscale("log")
        axes.set_xticks(sorted({b for rows in errors.values() for b in rows}))
        axes.set_xlabel("bits of a weight")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel("|error| / |output|")
        axes.set_title(title)
        axes.legend()
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


def draw_grid(
    weights: Sequence[float], grids: Mapping[int, tuple[float, int]], *, title: str
) -> Figure:
    """One group of weights and the places they may take, a panel for each number of bits.

    Args:
        weights: the group.
        grids: by bits, the grid's scale and zero point.
        title: the setting.

    Raises:
        ValueError: no weight or no grid.
    """
    if not len(weights) or not grids:
        raise ValueError("draw_grid() needs weights and a grid.")
    with course_style():
        figure, _ = empty_figure(height=1.0 + 1.9 * len(grids))
        figure.clear()
        panels = figure.subplots(len(grids), sharex=True, squeeze=False)[:, 0]
        for axes, (bits, (scale, zero)) in zip(panels, grids.items(), strict=True):
            _grid(axes, weights, bits, scale, zero)
        panels[0].set_title(title)
        panels[-1].set_xlabel("weight")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _grid(axes: Axes, weights: Sequence[float], bits: int, scale: float, zero: int) -> None:
    places = [scale * (code - zero) for code in range(2**bits)]
    for code, place in enumerate(places):
        axes.plot([place, place], [0, 0.2], color="black", lw=1.5)
        axes.text(place, -0.06, str(code), ha="center", va="top", fontsize=10)
    for weight in weights:
        nearest = min(places, key=lambda place: abs(place - weight))
        axes.plot([weight, nearest], [1, 0.2], color=WEIGHT_COLOR, lw=0.8)
    axes.plot(weights, [1.0] * len(weights), "o", color=WEIGHT_COLOR, ms=5)
    axes.set_ylim(-0.35, 1.25)
    axes.set_yticks([0.1, 1], [f"{2**bits} places,\n{bits} bits", f"{len(weights)} weights"])
    axes.grid(False)


Points = Sequence[tuple[float, float, float]]


def draw_price(
    panels: Mapping[str, Mapping[str, Points]], *, device: str = "", kinds: Sequence[Evidence] = ()
) -> Figure:
    """Growth of perplexity over stored bits a weight, by method; one panel a model.

    Args:
        panels: by the panel's title, then by method, for each width (stored bits, percent of growth,
            its standard error).
        device: where it was measured; where `kinds` stand beside, the panels' titles say so.
        kinds: of numbers, beside measured ones.

    Raises:
        ValueError: no method, or a method without rows.
    """
    if not panels or not all(rows and all(rows.values()) for rows in panels.values()):
        raise ValueError("draw_price() needs a row for every method.")
    methods = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    with course_style():
        figure, _ = empty_figure(width=11.0 if len(panels) > 1 else 9.0)
        figure.clear()
        every = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        colors = rcParams["axes.prop_cycle"].by_key()["color"]
        for axes, (title, rows) in zip(every, panels.items(), strict=True):
            for name, points in rows.items():
                which = methods.index(name)
                bits, change, spread = zip(*sorted(points), strict=True)
                axes.errorbar(bits, change, yerr=spread if any(spread) else None, color=colors[which],
                              fmt=f"{MARKS[which]}-", capsize=4, ms=7, label=name)  # fmt: skip
            axes.set_yscale("symlog", linthresh=1, linscale=0.6)
            axes.set_yticks([0, 1, 3, 10, 30, 100], ["0%", "1%", "3%", "10%", "30%", "100%"])
            axes.set_xlabel("stored bits a weight")
            axes.set_title(title)
            axes.legend()
        every[0].set_ylabel("growth of perplexity")
        print_evidence(figure, [Evidence.MEASURED, *kinds], [] if kinds else [device])
    return figure


def draw_context_memory(
    memory_bytes: Mapping[str, Mapping[int, float]],
    cards: Mapping[str, float],
    *,
    title: str = "Weights and cache over the context",
    weight_bytes: Mapping[str, float] | None = None,
) -> Figure:
    """Bytes of each served model over its context, with the cards that would hold them.

    Args:
        memory_bytes: by name, then by context in tokens; a panel each.
        cards: usable bytes by name.
        title: the setting.
        weight_bytes: the part of each that is weights; the rest is cache.

    Raises:
        ValueError: nothing to draw, or weights of another model.
    """
    if not memory_bytes or (weight_bytes is not None and set(weight_bytes) != set(memory_bytes)):
        raise ValueError("draw_context_memory() needs one model or more, and weights of the same.")
    with course_style():
        figure, _ = empty_figure(width=11.0, height=4.8)
        figure.clear()
        panels = figure.subplots(1, len(memory_bytes), squeeze=False, sharey=True)[0]
        for axes, (name, rows) in zip(panels, memory_bytes.items(), strict=True):
            _areas(axes, rows, None if weight_bytes is None else weight_bytes[name])
            axes.set_title(name, fontsize=12)
            for size in cards.values():
                axes.axhline(size / GIB, color="black", ls=":", lw=1.2)
        most = max([*cards.values(), *(max(rows.values()) for rows in memory_bytes.values())])
        panels[0].set_ylim(0, 1.05 * most / GIB)
        panels[0].set_ylabel("GiB")
        _cards(panels[-1], cards)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _areas(axes: Axes, rows: Mapping[int, float], weights: float | None) -> None:
    contexts = sorted(rows)
    total = [rows[c] / GIB for c in contexts]
    floor = [0.0 if weights is None else weights / GIB] * len(contexts)
    if weights is not None:
        axes.fill_between(contexts, 0, floor, color=WEIGHT_COLOR, label="weights", lw=0)
    axes.fill_between(contexts, floor, total, facecolor=CACHE_COLOR, hatch="//", edgecolor="white", lw=0.5,
                      label="weights and cache" if weights is None else "cache")  # fmt: skip
    axes.plot(contexts, total, "o-", color="black", ms=4, lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{c // 1024}k" if c >= 1024 else str(c) for c in contexts])
    axes.set_xlim(contexts[0], contexts[-1])
    axes.set_xlabel("context, tokens")
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.92))  # below the largest card


def _cards(axes: Axes, cards: Mapping[str, float]) -> None:
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    for name, size in cards.items():
        text = f"{name}, {size / GIB:.0f} GiB"
        axes.text(1.02, size / GIB, text, va="center", fontsize=10, transform=beside)


def draw_decoding(
    names: Sequence[str],
    bound: Sequence[float],
    published: Sequence[float],
    *,
    title: str = "Tokens per second of one sequence",
) -> Figure:
    """Two bars a row: the bound from bytes (predicted, hollow) and what was published.

    Raises:
        ValueError: the rows do not match.
    """
    if not len(names) == len(bound) == len(published) or not names:
        raise ValueError("draw_decoding() needs as many names as bounds and published rates.")
    with course_style():
        figure, axes = empty_figure(height=1.6 + 0.5 * len(names))
        rows = range(len(names))
        axes.barh(rows, bound, height=0.72, fill=False, edgecolor="black", label="bound, predicted")
        axes.barh(rows, published, height=0.45, label="published")
        for row, (most, found) in enumerate(zip(bound, published, strict=True)):
            told = f"  {found:.0f} of {most:.0f}: {found / most:.0%}"
            axes.text(most, row, told, va="center", fontsize=10)
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.3)
        axes.set_xlabel("tokens per second")
        axes.set_title(title)
        axes.legend(loc="lower right")
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


__all__ = ["draw_context_memory", "draw_decoding", "draw_error_by_bits"]

check_public(globals())
