"""Who holds what, and bytes on one rank over the number of ranks: by a formula, and as a step takes them."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.checked import check_public
from utils.memory.measurement import Measurement
from utils.units import GB, Category, Evidence, parse_bytes
from utils.views.style import course_style, empty_figure, print_evidence

from .holders import draw_holders

# petroff10 (Petroff 2021, arXiv:2107.02270), a marker for each beside it.
_LOOKS = (("#3f90da", "o"), ("#ffa90e", "s"), ("#bd1f01", "^"), ("#832db6", "D"), ("#717581", "v"))

_SHARDED = {
    "DDP": (),
    "ZeRO-1": ("optimizer state",),
    "ZeRO-2": ("optimizer state", "gradients"),
    "ZeRO-3, FSDP2": ("optimizer state", "gradients", "parameters"),
}
_SENT = {
    "DDP": "all-reduce gradients",
    "ZeRO-1": "reduce-scatter gradients,\ngather parameters once",
    "ZeRO-2": "the same, gradients\nbucket by bucket",
    "ZeRO-3, FSDP2": "gather each block twice,\nreduce-scatter its gradients",
}
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
_MOST_NAMED = 2
_ASIDE, _FOOT = 1.16, 1.06  # factors on the axis of ranks


def draw_who_holds() -> Figure:
    """Four ranks in four schemes, by the textbook: what each holds, and what it sends."""
    title = "Who holds what, by the textbook, between backward and step; areas are bytes"
    figure = draw_holders(_SHARDED, sends=_SENT, title=title)
    print_evidence(
        figure, [Evidence.PREDICTED], ["16 bytes a parameter, mixed precision with Adam"]
    )
    return figure


def peak_rows(
    peaks: Mapping[str, Mapping[int, Measurement]],
    predicted_bytes: Mapping[str, Mapping[int, float]],
) -> list[dict[str, str | float]]:
    """Each peak beside its formula, in GB: its states, the rest, and the largest of the rest.

    Args:
        peaks: by strategy, a step's measurement by the number of ranks.
        predicted_bytes: by strategy, bytes of states by the number of ranks.
    """
    return [
        _peak_row(f"{name}, {ranks}", run, predicted_bytes[name][ranks])
        for name, found in peaks.items()
        for ranks, run in found.items()
    ]


def _peak_row(label: str, run: Measurement, formula_bytes: float) -> dict[str, str | float]:
    sizes = {str(category): size / GB for category, size in run.breakdown.items()}
    rest = {name: size for name, size in sizes.items() if name not in _STATES}
    largest = sorted(rest, key=lambda name: -rest[name])[:_MOST_NAMED]
    return {
        "": label,
        "formula": formula_bytes / GB,
        "peak": run.peak_bytes / GB,
        "states": sum(sizes.values()) - sum(rest.values()),
        "rest": sum(rest.values()),
        "in": run.peak_phase,
        "largest of the rest": ", ".join(f"{name} {rest[name]:.2f}" for name in largest),
    }


def draw_staircase(
    peaks: Mapping[str, Mapping[int, Measurement]],
    predicted_bytes: Mapping[str, Mapping[int, float]],
    *,
    limit: str | None = None,
    title: str = "",
) -> Figure:
    """Peaks of one rank over the number of ranks, with the formula of each as a dashed line.

    A bar joins each peak to its own formula; strategies stand beside each other around a number of
    ranks.

    Args:
        peaks: by strategy, a step's measurement by the number of ranks; at most five strategies.
        predicted_bytes: by strategy, bytes by the number of ranks. Strategies with the same
            formula share its line.
        limit: a card's memory, such as "16GB", drawn as a line.

    Raises:
        ValueError: nothing to draw, more than five strategies, or a limit that is no size.
    """
    if not any(peaks.values()) or len(peaks) > len(_LOOKS):
        raise ValueError(f"A staircase shows 1 to {len(_LOOKS)} strategies; got {len(peaks)}.")
    looks = dict(zip(peaks, _LOOKS, strict=False))
    with course_style():
        figure, axes = empty_figure()
        _draw_formulas(axes, predicted_bytes, looks)
        for place, (name, found) in enumerate(peaks.items()):
            color, marker = looks[name]
            aside = _ASIDE ** (place - (len(peaks) - 1) / 2)
            beside = [ranks * aside for ranks in sorted(found)]
            sizes = [found[ranks].peak_bytes / GB for ranks in sorted(found)]
            axes.plot(beside, sizes, color=color, marker=marker, ms=8, ls="", label=name)
            _draw_rest(axes, found, predicted_bytes.get(name, {}), aside, color)
        if limit is not None:
            axes.axhline(parse_bytes(limit) / GB, color="black", ls=":", label=f"{limit} card")
        _finish(axes, sorted({r for d in (*peaks.values(), *predicted_bytes.values()) for r in d}))
        axes.set_title(title)
        shown = [m for found in peaks.values() for m in found.values()]
        print_evidence(
            figure, [*(m.evidence for m in shown), Evidence.PREDICTED], [m.device for m in shown]
        )
    return figure


def _draw_rest(
    axes: Axes,
    found: Mapping[int, Measurement],
    formula: Mapping[int, float],
    aside: float,
    color: str,
) -> None:
    """From what the formula says of as many ranks up to the peak."""
    for ranks in sorted(set(found) & set(formula)):
        top, foot = found[ranks].peak_bytes / GB, formula[ranks] / GB
        axes.vlines(ranks * aside, foot, top, color=color, lw=2.5, alpha=0.6)
        axes.hlines(foot, ranks * aside / _FOOT, ranks * aside * _FOOT, color=color, lw=2.5)


def _draw_formulas(
    axes: Axes, predicted: Mapping[str, Mapping[int, float]], looks: Mapping[str, tuple[str, str]]
) -> None:
    same: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, sizes in predicted.items():
        same.setdefault(tuple(sorted(sizes.items())), []).append(name)
    for number, (sizes, names) in enumerate(same.items()):
        color = looks[names[0]][0] if names[0] in looks else "#4d4d4d"
        label = "" if number else "dashed: states by the formula"
        ranks, values = zip(*sizes, strict=True)
        axes.plot(
            ranks, [value / GB for value in values], color=color, ls="--", lw=1.3, label=label
        )


def _finish(axes: Axes, ranks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("ranks (logarithmic)")
    axes.set_ylabel("peak of one rank (GB, logarithmic)")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


__all__ = ["draw_staircase", "draw_who_holds"]

check_public(globals())
