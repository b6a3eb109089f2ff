"""The answer as a table: what was tried, in the order in which one would choose."""

from __future__ import annotations

from utils.fitting.model_fit import Fit
from utils.fitting.tried_cures import Tried
from utils.fitting.verdict import FitVerdict
from utils.units import format_bytes

SMALL_SHARE = 0.03  # of what is missing: cures that save less share one line
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
WORDS = ("yes", "just", "no")


def ranked(found: Fit) -> list[Tried]:
    """Cures, sets of several and shorter texts, in the order of `_order`.

    Left out is what saves less than `SMALL_SHARE` of what is missing: see `small`.
    """
    sets = (found.together, found.pair, found.usual)
    several = {
        frozenset(t.name for t in tried.cures): tried
        for tried in sets
        if tried and len(tried.cures) > 1
    }
    worth = [tried for tried in found.cures if tried not in small(found)]
    return sorted([*worth, *several.values(), *found.shorter], key=_order)


def _order(tried: Tried) -> tuple[int, bool, float, int]:
    """What fits, then what is the same step, then the quickest, then the smallest."""
    seconds = float("inf") if tried.added_seconds is None else tried.added_seconds
    is_shorter = "tokens" in tried.cures[0].changes
    return WORDS.index(tried.verdict.word), is_shorter, seconds, tried.verdict.needed_bytes


def small(found: Fit) -> list[Tried]:
    """What is no answer by itself: it saves next to nothing of what is missing."""
    missing_bytes = max(0, -found.verdict.spare_bytes)
    return [tried for tried in found.cures if tried.saved_bytes < SMALL_SHARE * missing_bytes]


def gaps_row(verdict: FitVerdict) -> dict[str, str]:
    """Expandable segments, as a row of the table; its bytes are a bound: what tensors take alone."""
    fits = verdict.peak_bytes <= verdict.usable_bytes
    return {
        "cure": "expandable segments",
        "needed": f"{format_bytes(verdict.peak_bytes)} or more",
        "saved": f"at most {format_bytes(verdict.gap_bytes)}",
        "added a step": "not modelled",
        **verdict.times,
        "fits": ("just" if verdict.is_close or not verdict.fits else "yes") if fits else "no",
        "costs": "the code stays as it is; not on Windows",
        "line": EXPANDABLE,
    }


def rows(found: Fit) -> list[dict[str, str]]:
    """The table, with the allocator's gaps as its last row."""
    return [*(tried.row() for tried in ranked(found)), gaps_row(found.verdict)]


def lesser(found: Fit) -> str:
    """What the table leaves out, in a line; empty where it leaves out nothing."""
    some = [f"{tried.name} {format_bytes(tried.saved_bytes)}" for tried in small(found)]
    if not some:
        return ""
    missing = format_bytes(-found.verdict.spare_bytes)
    return f"Under {SMALL_SHARE:.0%} of the {missing} that are missing: {', '.join(some)}."


def not_tried(found: Fit) -> list[str]:
    """What gains nothing, and what was not tried and why, a line each."""
    said = ", ".join(tried.name for tried in found.without_gain)
    lines = [f"Tried, and gains nothing here: {said}."] if said else []
    return [*lines, *(f"Not tried: {name}: {why}." for name, why in found.refused.items())]
