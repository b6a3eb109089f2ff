"""Checks of bad input: each error says the rule, the numbers and the nearest valid choice."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from numbers import Real
from typing import TypeGuard

# Divisors up to this, and their partners, are looked at: all of them for numbers up to 10**12.
LARGEST_DIVISOR_TRIED = 10**6
MOST = 10**15  # nothing that is counted here, tokens or parameters, comes to more
_KIND_NAMES = {type(None): "None"}


def whole(where: str, *, least: int = 1, most: int = MOST, **counts: object) -> dict[str, int]:
    """The counts as plain integers; 8.0 and numpy's 8 count as 8.

    Raises:
        ValueError: one is no whole number, below `least` or above `most`; the sentence names it.
    """
    return {name: _whole(where, name, value, least, most) for name, value in counts.items()}


def keep_whole(row: object, where: str, *names: str, optional: str = "", least: int = 1) -> None:
    """`whole` for fields of a frozen row, which keeps 8 where 8.0 was given.

    The field `optional` may be None.

    Raises:
        ValueError: a field is no whole number, or is below `least`; the sentence names it.
    """
    if optional and getattr(row, optional) is not None:
        names = (*names, optional)
    for name in names:
        given = getattr(row, name)
        count = _whole(where, name, given, least)
        if count is not given:  # a search makes thousands of plans: setting takes time
            object.__setattr__(row, name, count)


def _whole(where: str, name: str, value: object, least: int, most: int = MOST) -> int:
    count = value if type(value) is int else _as_int(where, name, value)
    if count < least:
        raise ValueError(f"{where}: {name} is {count}; it must be {least} or more.")
    if count > most:
        raise ValueError(f"{where}: {name} is {count:,}; it must be {most:,} or less.")
    return count


def positive(where: str, *, least: float = 1, **amounts: object) -> None:
    """Every amount is a finite number, `least` or more. Raises ValueError naming one that is not."""
    for name, value in amounts.items():
        if not _is_number(value):
            hint = _unquoted(value)
            raise ValueError(f"{where}: {name} is {value!r}; it must be a number{hint}.")
        if not least <= value < math.inf:
            raise ValueError(f"{where}: {name} is {value}; it must be {least} or more, and finite.")


def above_zero(where: str, **amounts: float | None) -> None:
    """Every amount that is given is above 0 and finite. Raises ValueError naming one that is not."""
    for name, value in amounts.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{where}: {name} is {value}; it must be above 0, and finite.")


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """`value` is one of `choices`. Raises ValueError listing them."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; write one of {', '.join(map(repr, choices))}.")


def some(where: str, **rows: Sized) -> None:
    """None of the rows is empty. Raises ValueError naming one that is."""
    for name, row in rows.items():
        if not len(row):
            raise ValueError(f"{where}: {name} is empty; give one or more.")


def of_kind(where: str, **values: tuple[object, *tuple[type, ...]]) -> None:
    """Every value is of one of the kinds behind it: `of_kind("estimate", plan=(plan, Plan))`.

    Raises:
        ValueError: one is not; the sentence says what is wanted.
    """
    for name, (value, *kinds) in values.items():
        if not isinstance(value, tuple(kinds)):
            wanted = " or ".join(_KIND_NAMES.get(kind, kind.__name__) for kind in kinds)
            raise ValueError(f"{where}: {name} is {_short(value)}; it must be of type {wanted}.")


def divides(name: str, divisor: int, of_what: str, number: int) -> None:
    """`divisor` divides `number`. Raises ValueError with the nearest divisors."""
    if number % divisor:
        below, above = nearest_divisors(number, divisor)
        near = f"{below} or {above}" if above else f"{below}"
        raise ValueError(
            f"{name} is {divisor} and does not divide {number} ({of_what}) evenly. "
            f"Nearest that does: {near}."
        )


def nearest_divisors(number: int, wanted: int) -> tuple[int, int | None]:
    """The divisors of `number` next below and above `wanted`."""
    largest = min(math.isqrt(number), LARGEST_DIVISOR_TRIED)
    small = [d for d in range(1, largest + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    below = max(d for d in divisors if d <= wanted)
    return below, min((d for d in divisors if d >= wanted), default=None)


def _as_int(where: str, name: str, value: object) -> int:
    if _is_number(value) and math.isfinite(value):
        if value == int(value):
            return int(value)
        below = math.floor(value)
        near = f"{below} or {below + 1}" if below >= 1 else f"{max(1, below + 1)}"
        raise ValueError(f"{where}: {name} is {value}; it must be a whole number. Nearest: {near}.")
    hint = _unquoted(value)
    raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number{hint}.")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _unquoted(value: object) -> str:
    """Advice on a number in quotes."""
    is_number = isinstance(value, str) and value.replace(".", "", 1).isdecimal()
    return f", without quotes: {value}" if is_number else ""


def _short(value: object) -> str:
    """A value in an error's sentence, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
