"""Figures of quantization and serving: a grid, its price, memory over context, tokens per second."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

MARKS = "osD^v"
FORMATS = ("#3f90da", "#ffa90e", "#bd1f01", "#4d4d4d", "#832db6")  # bits of weights and cache
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1)))
METHODS = (
    "nearest",
    "GPTQ",
    "AWQ",
    "NF4",
)  # each has its own colour and mark, the same in all figures
WEIGHT_COLOR, ZERO_COLOR = "#3f90da", "#bd1f01"  # of the course's style


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
        for name, rows in errors.items():
            color, mark, bits = *_look(name, list(errors)), sorted(rows)
            middle = [sorted(rows[b])[len(rows[b]) // 2] for b in bits]
            (line,) = axes.plot(bits, middle, f"{mark}-", color=color, label=name)
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


def _look(name: str, others: Sequence[str]) -> tuple[str, str]:
    """A method's colour and mark; those that have none of their own come after."""
    names = [*METHODS, *(other for other in others if other not in METHODS)]
    place = names.index(name)
    colors: list[str] = rcParams["axes.prop_cycle"].by_key()["color"]
    return colors[place % len(colors)], MARKS[place % len(MARKS)]


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
        panels[-1].legend(loc="lower left", fontsize=10)
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def _grid(axes: Axes, weights: Sequence[float], bits: int, scale: float, zero: int) -> None:
    places = [scale * (code - zero) for code in range(2**bits)]
    for code, place in enumerate(places):
        axes.plot([place, place], [0, 0.2], color="black", lw=1.5)
        axes.text(place, -0.06, str(code), ha="center", va="top", fontsize=10)
    axes.plot([0], [-0.27], "^", color=ZERO_COLOR, ms=9, ls="", label="zero point")
    for weight in weights:
        nearest = min(places, key=lambda place: abs(place - weight))
        axes.plot([weight, nearest], [1, 0.2], color=WEIGHT_COLOR, lw=0.8)
    axes.plot(weights, [1.0] * len(weights), "o", color=WEIGHT_COLOR, ms=5)
    axes.set_ylim(-0.45, 1.25)
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
    methods = [name for rows in panels.values() for name in rows]
    with course_style():
        figure, _ = empty_figure(width=11.0 if len(panels) > 1 else 9.0)
        figure.clear()
        every = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        for axes, (title, rows) in zip(every, panels.items(), strict=True):
            for name, points in rows.items():
                color, mark = _look(name, methods)
                bits, change, spread = zip(*sorted(points), strict=True)
                axes.errorbar(bits, change, yerr=spread if any(spread) else None, color=color,
                              fmt=f"{mark}-", capsize=4, ms=7, label=name)  # fmt: skip
            axes.set_yscale("log", nonpositive="clip")
            axes.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3%", "1%", "3%", "10%", "30%", "100%"])
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(0.15, 120)
            axes.set_xlabel("stored bits a weight")
            axes.set_title(title)
            axes.legend()
        every[0].set_ylabel("growth of perplexity (logarithmic)")
        print_evidence(figure, [Evidence.MEASURED, *kinds], [] if kinds else [device])
    return figure


Ratios = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def draw_inputs(ratios: Ratios, channels: Mapping[str, Sequence[float]], *, layer: str) -> Figure:
    """How far the largest input channel stands out, by matrix, and all channels of one of them.

    Args:
        ratios: by matrices that share an input, the largest channel over the median one in each
            block: as trained, and with a planted channel.
        channels: by arm, the mean magnitude of each input channel of `layer`.
        layer: which matrix that is.

    Raises:
        ValueError: nothing to draw.
    """
    if not ratios or not channels:
        raise ValueError("draw_inputs() needs ratios, and the channels of one layer.")
    with course_style():
        figure, _ = empty_figure(width=11.0, height=4.4)
        figure.clear()
        left, right = figure.subplots(1, 2)
        colors = rcParams["axes.prop_cycle"].by_key()["color"]
        for arm, name in enumerate(channels):
            rows = [(row, both[arm]) for row, both in enumerate(ratios.values())]
            x = [value for _, values in rows for value in values]
            y = [row + 0.3 * arm - 0.15 for row, values in rows for _ in values]
            left.plot(x, y, MARKS[2 * arm], color=colors[2 * arm], ls="", ms=7, label=name)
            right.plot(
                channels[name],
                MARKS[2 * arm],
                color=colors[2 * arm],
                ls="-",
                lw=0.8,
                ms=4 + 2 * arm,
                zorder=3 - arm,
            )  # as trained before what it hides
        left.set_xscale("log")
        left.set_xticks([1, 3, 10, 30], ["1", "3", "10", "30"])
        left.xaxis.set_minor_formatter(NullFormatter())
        left.set_yticks(range(len(ratios)), list(ratios))
        left.set_ylim(len(ratios) - 0.4, -1.3)  # room for the legend
        left.set_xlabel("largest channel over the median one")
        left.set_title("All matrices, a mark for each block")
        left.legend(loc="upper center", ncols=2)
        right.set_yscale("log")
        right.set_xlabel("input channel")
        right.set_ylabel("mean |x|")
        right.set_title(f"Input channels of {layer}")
        print_evidence(figure, [Evidence.MEASURED])
    return figure


def draw_context_memory(
    memory_bytes: Mapping[str, Mapping[str, Mapping[int, float]]],
    cards: Mapping[str, float],
    *,
    title: str = "Weights and cache over the context",
    weight_bytes: Mapping[str, Mapping[str, float]] | None = None,
    trained_tokens: int | None = None,
) -> Figure:
    """Bytes of each served model over its context, with the cards that would hold them.

    Args:
        memory_bytes: by model, a panel each; then by format, a line each; then by context in tokens.
        cards: usable bytes by name.
        title: the setting.
        weight_bytes: the part of each line that is weights; a star marks where the cache is as large.
        trained_tokens: contexts beyond are shaded.

    Raises:
        ValueError: nothing to draw, or weights of another model.
    """
    if not memory_bytes or (weight_bytes is not None and set(weight_bytes) != set(memory_bytes)):
        raise ValueError("draw_context_memory() needs one model or more, and weights of the same.")
    with course_style():
        figure, _ = empty_figure(width=11.0, height=5.2)
        figure.clear()
        panels = figure.subplots(1, len(memory_bytes), squeeze=False, sharey=True)[0]
        for axes, (name, lines) in zip(panels, memory_bytes.items(), strict=True):
            _memory_lines(axes, lines, {} if weight_bytes is None else weight_bytes[name])
            axes.set_title(name, fontsize=12)
            for size in cards.values():
                axes.axhline(size / GIB, color="black", ls=":", lw=1.2)
            if trained_tokens is not None:
                axes.axvspan(trained_tokens, axes.get_xlim()[1], color="#eeeeee", zorder=0, lw=0)
        panels[0].set_ylim(0, 1.05 * max(cards.values()) / GIB)
        panels[0].set_ylabel("GiB")
        if weight_bytes is not None:
            panels[0].plot([], [], "*", color="black", ms=12, ls="", label="cache = weights")
        panels[0].legend(loc="upper left", bbox_to_anchor=(0, 0.94), fontsize=10)
        _cards(panels[-1], cards)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _memory_lines(
    axes: Axes, lines: Mapping[str, Mapping[int, float]], weights: Mapping[str, float]
) -> None:
    for place, (name, rows) in enumerate(lines.items()):
        contexts = sorted(rows)
        total = [rows[c] / GIB for c in contexts]
        color = FORMATS[place % len(FORMATS)]
        axes.plot(contexts, total, color=color, ls=DASHES[place % len(DASHES)], label=name)
        if name in weights:
            slope = (rows[contexts[-1]] - rows[contexts[0]]) / (contexts[-1] - contexts[0])
            cross = weights[name] / slope
            if cross <= contexts[-1]:
                axes.plot([cross], [2 * weights[name] / GIB], "*", color=color, ms=12)
    first = next(iter(lines.values()))
    axes.set_xticks(_ticks(max(first)), [f"{c // 1024}k" for c in _ticks(max(first))])
    axes.set_xlim(0, max(first))
    axes.set_xlabel("context, tokens")


def _ticks(longest: int) -> list[int]:
    return list(range(0, longest + 1, max(1024, longest // 4)))


def draw_rates(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    ceilings: Mapping[str, float],
    *,
    title: str,
    full: Mapping[str, Collection[str]] | None = None,
    crossings: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """The bound on tokens per second over the batch, a line for each format.

    Args:
        panels: by the panel's title, then by format, batches and rates.
        ceilings: by the panel's title, the rate at which arithmetic takes as long.
        title: the setting.
        full: by the panel's title, the formats whose line ends because the card is full.
        crossings: by the panel's title, batch and rate where two formats are as fast.

    Raises:
        ValueError: nothing to draw, or a panel without a ceiling.
    """
    if not panels or set(ceilings) != set(panels):
        raise ValueError("draw_rates() needs one panel or more, and a ceiling for each.")
    with course_style():
        figure, _ = empty_figure(width=11.0, height=5.2)
        figure.clear()
        every = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
        for axes, (name, lines) in zip(every, panels.items(), strict=True):
            for place, (label, points) in enumerate(lines.items()):
                batches, rates = zip(*points, strict=True)
                look = {"color": FORMATS[place % len(FORMATS)], "ls": DASHES[place % len(DASHES)]}
                axes.plot(batches, rates, label=label, **look)
                if full and label in full[name]:
                    axes.plot(batches[-1:], rates[-1:], "X", color=look["color"], ms=9)
            for batch, rate in (crossings or {}).get(name, ()):
                axes.plot(batch, rate, "o", color="black", ms=11, mfc="none")
            axes.axhline(ceilings[name], color="black", ls=":", lw=1.2, label="arithmetic in bf16")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("batch, sequences")
            axes.set_title(name, fontsize=12)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.set_yticks([100, 300, 1000, 3000, 10_000, 30_000])
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        every[0].set_ylabel("tokens per second, all sequences")
        every[0].plot([], [], "X", color="black", ms=9, ls="", label="the card is full")
        if crossings:
            every[0].plot([], [], "o", color="black", ms=11, mfc="none", label="two formats cross")
        every[0].legend(loc="lower right", fontsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


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
    notes: Sequence[str] = (),
    title: str = "Tokens per second of one sequence",
) -> Figure:
    """Two bars a row: the bound from bytes (predicted, hollow) and what was published.

    Args:
        names: of the rows.
        bound: the most tokens per second.
        published: tokens per second.
        notes: what to write behind each row's share of its bound.
        title: the setting.

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
            told = f"  {found:.0f} of {most:.0f}: {found / most:.0%}{notes[row] if notes else ''}"
            axes.text(most, row, told, va="center", fontsize=10)
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.6 if notes else 0.3)
        axes.set_xlabel("tokens per second")
        axes.set_title(title)
        axes.legend(loc="upper right" if bound[0] < bound[-1] else "lower right")
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


__all__ = ["draw_context_memory", "draw_decoding", "draw_error_by_bits"]

check_public(globals())
