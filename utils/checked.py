"""What comes into a public function is held against its own annotations, and refused in a sentence.

Packages hand out their public names through `check_public` or `checked`. Inside of the project the
functions call each other as they are, so that engines take no time for it, and files that are
exported need nothing of this.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from numbers import Real
from typing import Any, TypeVar

from utils.annotations import hint_of, is_row, short

MOST_ITEMS = 1_000_000  # that a generator may give


Given = TypeVar("Given")


def checked(given: Given, home: str = "") -> Given:
    """A function with its arguments checked; a class, whose making is checked, is given back.

    Whole numbers that come as 8.0 or as numpy's reach the function as 8, an array of one axis as a
    list. A function belongs to the module `home` then, so that it travels to other processes by
    that name.

    Raises (when it is called):
        ValueError: an argument is of another type than annotated, is unknown, or is missing. The
            sentence names function and argument, what came, and what is wanted.
    """
    if inspect.isclass(given):
        _check_making(given)
    elif callable(given) and inspect.isfunction(inspect.unwrap(given)):
        return _checked(given, home, getattr(given, "__name__", ""))
    return given


def check_public(names: dict[str, Any], *, but: Container[str] = ()) -> None:
    """Check what a package's `__all__` names: `check_public(globals())` at its end.

    `but`: rows that engines make by the ten thousand.
    """
    for name in names["__all__"]:
        if name in names and name not in but:
            names[name] = checked(names[name], names["__name__"])


def asks_first(look: Callable[[dict[str, Any]], None]) -> Callable[[Given], Given]:
    """`look(given)` sees the arguments before their types are checked: it knows what was meant."""

    def mark(function: Given) -> Given:
        setattr(function, "look_first", look)  # noqa: B010
        return function

    return mark


def in_order(first: str, count: str, line: str) -> Callable[[dict[str, Any]], None]:
    """For `asks_first`: say the order of arguments where `count` is no whole number."""

    def look(given: dict[str, Any]) -> None:
        value = given.get(count, 1)
        if type(value) is bool or not isinstance(value, Real):
            raise ValueError(
                f"{count}={short(value)}: it must be a whole number. The {first} comes first: {line}."
            )

    return look


@functools.cache
def _checked(function: Any, home: str, name: str) -> Any:
    if hasattr(function, "is_checked") or not inspect.signature(function).parameters:
        return function
    look = getattr(function, "look_first", None)
    places, rest = _places(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if look is not None:
            look({**dict(zip(places, args, strict=False)), **kwargs})
        names = (*places, *[rest] * (len(args) - len(places)))
        args = tuple(
            _fitting(function, name, key, arg) for key, arg in zip(names, args, strict=False)
        )
        kwargs = {key: _fitting(function, name, key, arg) for key, arg in kwargs.items()}
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            problem = _unbound(function, name, args, kwargs)
            if problem is None:
                raise
            raise ValueError(problem) from error

    setattr(call, "is_checked", True)  # noqa: B010
    call.__module__ = home or function.__module__
    return call


def _check_making(kind: Any) -> None:
    """Check the arguments of a class's own `__init__`, in place: `isinstance` goes on as before."""
    made_otherwise = issubclass(kind, BaseException | enum.Enum | tuple)
    if "__init__" in vars(kind) and not made_otherwise:
        kind.__init__ = _checked(kind.__init__, "", kind.__name__)


def _places(function: Any) -> tuple[tuple[str, ...], str]:
    """Names of arguments that go by place, and of the one that takes all further."""
    parameters = inspect.signature(function).parameters.values()
    rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in by_place), (rest or [""])[0]


def _fitting(function: Any, where: str, name: str, value: Any) -> Any:
    """The value, or a whole number that it stands for, if it is of its type."""
    hint = hint_of(function, name)
    if hint is None:
        return value
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if hint.judged is not None and is_row(value) and not isinstance(value, hint.plain):
        value = value.tolist()
    if hint.items is not None and isinstance(value, Iterator):  # else its items cannot be judged
        value = list(itertools.islice(value, MOST_ITEMS))
    problem = hint.problem(value)
    if problem is None:
        return value
    if int in hint.plain and isinstance(value, float) and value.is_integer():
        return _fitting(function, where, name, int(value))
    raise ValueError(f"{where}: {name} is {short(value)}; {problem}.")


def _unbound(
    function: Any, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """What is wrong with a call that Python itself refuses; None where it takes it."""
    parameters = inspect.signature(function).parameters
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        why = str(error)
    else:
        return None
    for name in kwargs:
        if name not in parameters:
            offered = [each for each in parameters if each != "self"]
            near = difflib.get_close_matches(name, offered, n=3, cutoff=0.3) or offered
            return f"{where}: there is no argument {name}. There is {', '.join(near)}."
    taken = [p for p in parameters.values() if p.name != "self"]
    needed = [p for p in taken if p.default is p.empty and p.kind not in (2, 4)]
    shown = [p.name + "=..." * (p.kind == p.KEYWORD_ONLY) for p in needed]
    written = f"Write {where}({', '.join(shown)})."
    places = [name for name in _places(function)[0] if name != "self"]
    if "too many" not in why:
        return f"{where}: {why}. {written}"
    others = [name for name in parameters if name not in (*places, "self")]
    if not places:
        return f"{where}: every argument is given by its name: {_by_name(others)}." + (
            f" {written}" if needed else ""
        )
    hint = f" Give others by name: {_by_name(others)}." if others else ""
    return f"{where}: only {', '.join(places)} may stand without a name.{hint}"


def _by_name(names: Iterable[str]) -> str:
    return ", ".join(f"{name}=" for name in names)
