"""Predicted beside published, and how far off: per source, never pooled."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One published number and the prediction of it.

    Attributes:
        source: Which table.
        quantity: What is compared, with its unit.
        case: Which row.
        published: The published number.
        predicted: The planner's.
        size: What a naive rule would scale with (parameters for bytes, FLOP for rates); 0: none.
        fitted: A calibration constant was set on this row.
    """

    source: str
    quantity: str
    case: str
    published: float
    predicted: float
    size: float = 0.0
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative error, signed: above 0 where the prediction is too large."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Summary:
    """Errors of one quantity of one source, as shares of the published value.

    Attributes:
        source, quantity: What was compared.
        rows: How many.
        median, mean, p90, worst: Of the absolute relative errors.
        bias: Median signed error.
        baseline: Median absolute error of the naive rule, its one constant chosen best; None where
            there is no such rule.
        unfitted: Median absolute error on the rows that no constant was set on; None without any.
        seen_mean, left_out_mean: Mean absolute error on the rows that constants were set on, and on
            the others; None without any.
        ratios: Predicted over published, row by row.
    """

    source: str
    quantity: str
    rows: int
    median: float
    mean: float
    p90: float
    worst: float
    bias: float
    baseline: float | None
    unfitted: float | None
    seen_mean: float | None
    left_out_mean: float | None
    ratios: tuple[float, ...]


def summarize(rows: Iterable[Comparison]) -> list[Summary]:
    """One summary for each source and quantity, in the order they come."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for row in rows:
        groups.setdefault((row.source, row.quantity), []).append(row)
    return [_summary(key, group) for key, group in groups.items()]


def _summary(key: tuple[str, str], group: list[Comparison]) -> Summary:
    errors = [abs(row.error) for row in group]
    fresh = [abs(row.error) for row in group if not row.fitted]
    seen = [abs(row.error) for row in group if row.fitted]
    return Summary(
        source=key[0],
        quantity=key[1],
        rows=len(group),
        median=statistics.median(errors),
        mean=statistics.fmean(errors),
        p90=quantile(errors, 0.9),
        worst=max(errors),
        bias=statistics.median(row.error for row in group),
        baseline=_baseline(group),
        unfitted=statistics.median(fresh) if fresh else None,
        seen_mean=statistics.fmean(seen) if seen else None,
        left_out_mean=statistics.fmean(fresh) if fresh else None,
        ratios=tuple(1 + row.error for row in group),
    )


def _baseline(group: list[Comparison]) -> float | None:
    """The median error of published = constant * size, with the constant that suits them best."""
    if not all(row.size for row in group):
        return None
    constant = statistics.median(row.published / row.size for row in group)
    return statistics.median(abs(constant * row.size / row.published - 1) for row in group)


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
