"""A decision matrix: what is impossible is struck out first, then what is left is weighed.

A score is the sum over criteria of weight x best / value, weights adding up to one, where the best is
taken among the options that are left. So an option that is twice as dear gets half the marks for it,
and another loser in the table changes nothing. (Marks between the worst and the best of each column,
as often seen, change with every row that is added, and can turn the order of two others.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from utils.checked import check_public, checked
from utils.rules import positive

__all__ = ["Option", "Ranked", "decide", "winners"]


@dataclass(frozen=True)
class Option:
    """One row of the matrix.

    Attributes:
        name: As it is shown.
        values: By criterion; less is better, and all are above zero: "usd", "days", ...
        obstacle: Why it cannot run at all; "" where it can.
    """

    name: str
    values: Mapping[str, float]
    obstacle: str = ""


@dataclass(frozen=True)
class Ranked:
    """An option with its marks.

    Attributes:
        option: The row.
        score: Up to 1, for an option that is best in everything; None where it is struck out.
        marks: Weight x best / value by criterion.
        struck: Why it is out: its obstacle, or the limit that it passes.
    """

    option: Option
    score: float | None
    marks: dict[str, float]
    struck: str = ""


def decide(
    options: Sequence[Option],
    weights: Mapping[str, float],
    limits: Mapping[str, float] | None = None,
) -> list[Ranked]:
    """The options in order, the winner first and what is struck out last.

    Args:
        options: Rows with the same criteria.
        weights: By criterion, in any scale; a criterion without one weighs nothing.
        limits: The most of a criterion that is allowed: {"days": 30} is a deadline.

    Raises:
        ValueError: no options, weights below zero or all zero, an unknown criterion, a value that is
            missing or not above zero.
    """
    limits = dict(limits or {})
    shares = _shares(weights)
    _check(options, [*shares, *limits])
    out = {row.name: row.obstacle or _over(row, limits) for row in options}
    left = [row for row in options if not out[row.name]]
    best = {name: min((row.values[name] for row in left), default=math.nan) for name in shares}
    ranked = []
    for row in options:
        marks = (
            {}
            if out[row.name]
            else {name: share * best[name] / row.values[name] for name, share in shares.items()}
        )
        ranked.append(Ranked(row, sum(marks.values()) if marks else None, marks, out[row.name]))
    return sorted(ranked, key=lambda row: -1.0 if row.score is None else row.score, reverse=True)


def winners(
    options: Callable[[float], Sequence[Option]],
    prices: Sequence[float],
    weights: Callable[[float], Mapping[str, float]],
    shares: Sequence[float],
    limits: Mapping[str, float] | None = None,
) -> list[list[str]]:
    """The winner's name for every price (row) and every weight (column); "" where none is left.

    Args:
        options: The matrix at a price.
        prices: What `options` is called with.
        weights: The weights at a share.
        shares: What `weights` is called with.
        limits: As for `decide`.
    """
    grid = []
    ranked = checked(decide)  # what the two functions return is theirs
    for price in prices:
        rows = options(price)
        best = [ranked(rows, weights(share), limits)[0] for share in shares]
        grid.append([row.option.name if row.score is not None else "" for row in best])
    return grid


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    if not weights:
        raise ValueError("decide: no weights. Write {'usd': 3, 'days': 1}, for example.")
    positive("decide, weights", least=0, **weights)
    total = sum(weights.values())
    if not total:
        raise ValueError("decide: all weights are 0, so no option is better than another.")
    return {name: weight / total for name, weight in weights.items()}


def _check(options: Sequence[Option], criteria: Sequence[str]) -> None:
    if not options:
        raise ValueError("decide: there are no options.")
    names = [row.name for row in options]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"decide: two options are called {twice[0]!r}.")
    for row in options:
        for name in criteria:
            value = row.values.get(name)
            if row.obstacle and value is None:
                continue
            if value is None:
                raise ValueError(f"decide: {row.name} has no value for {name!r}.")
            if not 0 < value < math.inf:
                raise ValueError(f"decide: {name} of {row.name} is {value}; it must be above 0.")


def _over(row: Option, limits: Mapping[str, float]) -> str:
    for name, most in limits.items():
        if row.values[name] > most:
            return f"{name} {_short(row.values[name])}, the limit is {_short(most)}"
    return ""


def _short(value: float) -> str:
    """A tenth where it may decide: 30.2 days are not 30."""
    return f"{value:,.1f}" if value < 100 and value % 1 else f"{value:,.0f}"


check_public(globals())
