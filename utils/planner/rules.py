"""Checks of bad input: each error says the rule, the numbers and the nearest valid choice."""

from __future__ import annotations

from collections.abc import Sequence


def positive(where: str, **counts: float) -> None:
    """Every count is 1 or more. Raises ValueError naming the first that is not."""
    for name, value in counts.items():
        if not value >= 1:
            raise ValueError(f"{where}: {name} is {value}; it must be 1 or more.")


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """`value` is one of `choices`. Raises ValueError listing them."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; write one of {', '.join(map(repr, choices))}.")


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
    below = next(d for d in range(min(wanted, number), 0, -1) if number % d == 0)
    above = next((d for d in range(wanted, number + 1) if number % d == 0), None)
    return below, above
