"""Figures of quantization and serving: error over bits, memory over context, tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from matplotlib.transforms import blended_transform_factory

from utils.checked import check_public
from utils.units import GIB, Evidence
from utils.views.style import course_style, empty_figure, print_evidence

MARKS = "osD^v"


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
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(lambda y, _: f"{y:.0%}")
        axes.set_ylabel("|error| / |output|")
        axes.set_title(title)
        axes.legend()
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


def draw_price(
    rows: Mapping[str, Sequence[tuple[float, float, float]]], *, device: str = "", title: str
) -> Figure:
    """Growth of perplexity over stored bits a weight, by method.

    Args:
        rows: by method, for each width (stored bits, percent of growth, its standard error).
        device: where it was measured.
        title: the setting.

    Raises:
        ValueError: no method, or a method without rows.
    """
    if not rows or not all(rows.values()):
        raise ValueError("draw_price() needs a row for every method.")
    with course_style():
        figure, axes = empty_figure()
        for mark, (name, points) in zip(MARKS, rows.items(), strict=False):
            bits, change, spread = zip(*sorted(points), strict=True)
            axes.errorbar(bits, change, yerr=spread, fmt=f"{mark}-", capsize=4, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}%")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("stored bits a weight, scales and zero points included")
        axes.set_ylabel("growth of perplexity per byte")
        axes.set_title(title)
        axes.legend()
        print_evidence(figure, [Evidence.MEASURED], [device])
    return figure


def draw_context_memory(
    memory_bytes: Mapping[str, Mapping[int, float]],
    cards: Mapping[str, float],
    *,
    title: str = "Weights and cache over the context",
) -> Figure:
    """Bytes of each served model over its context, with the cards that would hold them.

    Args:
        memory_bytes: by name, then by context in tokens; both axes are drawn in powers of two.
        cards: usable bytes by name.

    Raises:
        ValueError: nothing to draw.
    """
    if not memory_bytes:
        raise ValueError("draw_context_memory() needs one model or more.")
    with course_style():
        figure, axes = empty_figure(height=5.0)
        for mark, (name, rows) in zip(MARKS, memory_bytes.items(), strict=False):
            contexts = sorted(rows)
            axes.plot(contexts, [rows[c] / GIB for c in contexts], f"{mark}-", label=name)
        every = sorted({context for rows in memory_bytes.values() for context in rows})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(every, [f"{c // 1024}k" if c >= 1024 else str(c) for c in every])
        _cards(axes, cards)
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("GiB")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.25, 1))
        print_evidence(figure, [Evidence.PREDICTED])
    return figure


def _cards(axes: Axes, cards: Mapping[str, float]) -> None:
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    for name, size in cards.items():
        axes.axhline(size / GIB, color="black", ls=":", lw=1.2)
        axes.text(
            1.01,
            size / GIB,
            f"{name}, {size / GIB:.0f} GiB",
            va="center",
            fontsize=10,
            transform=beside,
        )


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
            axes.text(most, row, f"  {found / most:.0%}", va="center", fontsize=10)
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.12)
        axes.set_xlabel("tokens per second")
        axes.set_title(title)
        axes.legend(loc="lower right")
        print_evidence(figure, [Evidence.PREDICTED, Evidence.PUBLISHED])
    return figure


__all__ = ["draw_context_memory", "draw_decoding", "draw_error_by_bits"]

check_public(globals())
