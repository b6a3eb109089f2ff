"""What kind an answer is: reads it into one form, or says what is wanted.

A learner may write the same answer in several ways. A kind makes one of them: numpy's numbers become
Python's, the keys of a dict stand in the order that the check names them, " Half" is "half".
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from utils.labs.verdict import Verdict, not_yet, shown

NO_RETURN = "Is there a `return`? Does every path through the function end in one?"


class WrongKind(Exception):
    """A value is not of the kind; the text says more than the kind's name does, or is empty."""


class NotYet(Exception):
    """Ends a check from within a helper; `takes` and `Exercise` hand its verdict on."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


@dataclass(frozen=True)
class Kind:
    """A kind of answer.

    Args:
        what: Its name with an article: "a number of GiB".
        read: Gives the value in its one form, or raises `WrongKind`.
        parts: The names of its parts, where it is a dict with given keys.
    """

    what: str
    read: Callable[[Any], Any]
    parts: tuple[str, ...] = ()

    def of(self, value: Any) -> Any:
        """The learner's value in its one form.

        Raises:
            NotYet: it is of another kind.
        """
        try:
            return self.read(value)
        except WrongKind as hint:
            verdict = not_yet(f"{self.what} is wanted", got=shown(value), nudge=str(hint))
            raise NotYet(verdict) from None

    def returned(self, value: Any) -> Any:
        """What the learner's function gave, in its one form.

        Raises:
            NotYet: it is of another kind, or the function gave nothing.
        """
        try:
            return self.read(value)
        except WrongKind as hint:
            note, nudge = f"your function is to return {self.what}", str(hint)
            if value is None:
                note, nudge = f"your function returns nothing, and {self.what} is wanted", NO_RETURN
            raise NotYet(not_yet(note, got=shown(value), nudge=nudge)) from None


def as_number(value: Any) -> int | float | None:
    """A number as Python's int or float, also one of numpy's; None if it is none, as True is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def equal(found: Any, right: Any, *, within: float = 0.0, relative: float = 0.0) -> bool:
    """Whether an answer is the right one: the only place where labs compare numbers.

    Numbers may lie `within`, or `relative` times the right one, apart, whichever is more. NaN and
    infinities equal nothing, and True is not 1. Sequences and mappings are compared part by part.
    """
    a, b = as_number(found), as_number(right)
    if a is not None and b is not None:
        try:
            return abs(a - b) <= max(within, relative * abs(b)) and math.isfinite(a + b)
        except OverflowError:  # an int that no float can hold
            return False
    if isinstance(right, (tuple, list)):
        same_size = isinstance(found, (tuple, list)) and len(found) == len(right)
        return same_size and all(
            equal(x, y, within=within, relative=relative) for x, y in zip(found, right, strict=True)
        )
    if isinstance(right, Mapping):
        same_keys = isinstance(found, Mapping) and found.keys() == right.keys()
        return same_keys and all(
            equal(found[key], right[key], within=within, relative=relative) for key in right
        )
    return type(found) is type(right) and found == right


def same_float(found: Any, right: float) -> bool:
    """Whether two floats are the same number, where NaN, infinities and -0.0 are wanted as such."""
    value = as_number(found)
    if value is None or value != value or math.isnan(right):  # NaN; math's is not for every int
        return value is not None and value != value and math.isnan(right)
    return value == right and (value != 0 or math.copysign(1, value) == math.copysign(1, right))


def anything(what: str = "an answer") -> Kind:
    """Whatever it is; the check looks for itself."""
    return Kind(what, lambda value: value)


def number(what: str = "a number") -> Kind:
    """An int or float, of Python or numpy."""
    return Kind(what, _read_number)


def whole(what: str = "a whole number") -> Kind:
    """A number without a fraction, read as an int: 12, 12.0 or np.int64(12)."""

    def read(value: Any) -> int:
        found = _read_number(value)
        if isinstance(found, float) and not found.is_integer():
            raise WrongKind("A whole number has nothing after the point.")
        return int(found)

    return Kind(what, read)


def flag(what: str = "True or False") -> Kind:
    """A truth value, of Python or numpy; neither 0 nor 1."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
            raise WrongKind("Write True or False, without quotes.")
        return bool(value)

    return Kind(what, read)


def text(what: str = "a text") -> Kind:
    """A string, read in lower case and without blanks around it."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise WrongKind("Write it in quotes.")
        return value.strip().lower()

    return Kind(what, read)


def one_of(*options: str, what: str = "") -> Kind:
    """One of some texts, whatever its case; read as it is spelled here."""
    spelled = {option.lower(): option for option in options}
    names = ", ".join(f'"{option}"' for option in options[:-1]) + f' or "{options[-1]}"'

    def read(value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in spelled:
            raise WrongKind("" if not what else f"It is {names}.")
        return spelled[value.strip().lower()]

    return Kind(what or names, read)


def function(what: str = "a function") -> Kind:
    """Something to call."""

    def read(value: Any) -> Any:
        if not callable(value):
            raise WrongKind("Give its name, without calling it.")
        return value

    return Kind(what, read)


def instance(types: type | tuple[type, ...], what: str, hint: str = "") -> Kind:
    """An object of a class, such as a tensor or a Plan."""

    def read(value: Any) -> Any:
        if not isinstance(value, types):
            raise WrongKind(hint)
        return value

    return Kind(what, read)


def tensor(what: str = "a tensor", hint: str = "") -> Kind:
    """A plain tensor, or an array of numpy's, read as a tensor.

    Subclasses are refused: their own operations would answer when the check compares.
    """

    def read(value: Any) -> torch.Tensor:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return torch.from_numpy(np.array(value))
        if not isinstance(value, torch.Tensor):
            raise WrongKind(hint)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise WrongKind(
                f"A plain tensor is wanted, and {type(value).__name__} is a class of its own."
            )
        return value

    return Kind(what, read)


def several(part: Kind, count: int | None = None, what: str = "", *, in_order: bool = True) -> Kind:
    """A tuple or list of parts of one kind, read as a tuple; of any length if there is no count.

    Where their order says nothing a set will do.
    """
    forms = (tuple, list) if in_order else (tuple, list, set, frozenset)

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, forms) or count not in (None, len(value)):
            raise WrongKind("" if count is None else f"A tuple of {count} is wanted.")
        return tuple(part.read(each) for each in value)

    return Kind(what or f"a list, each part {part.what}", read)


def or_none(kind: Kind) -> Kind:
    """Of this kind, or None where None is an answer."""
    return Kind(f"{kind.what}, or None", lambda value: None if value is None else kind.read(value))


def keys(parts: Mapping[str, Kind]) -> Kind:
    """A dict with these keys in any order, read in this order, each value by its own kind."""
    what = f"a dict with the keys that the lab shows ({', '.join(map(repr, parts))})"

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise WrongKind("")
        if missing := [name for name in parts if name not in value]:
            raise WrongKind(f"There is no {missing[0]!r} in it.")
        if extra := [name for name in value if name not in parts]:
            raise WrongKind(f"{shown(extra[0])} is not one of its keys.")
        return {name: _part(name, kind, value[name]) for name, kind in parts.items()}

    return Kind(what, read, tuple(parts))


def _part(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind.read(value)
    except WrongKind as hint:
        note = f"{name}: {kind.what} is wanted"
        raise NotYet(not_yet(note, got=shown(value), nudge=str(hint))) from None


def _read_number(value: Any) -> int | float:
    found = as_number(value)
    if found is None:
        has_item = hasattr(value, "item") and not isinstance(value, (type, bool))
        raise WrongKind("`.item()` makes a Python number of it." if has_item else "")
    return found
