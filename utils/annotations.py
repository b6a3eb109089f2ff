"""What an annotation wants of a value, and how a sentence says that it wants it.

Plain types are looked at here, in a microsecond. typeguard judges all others, every item of them;
it is imported when the first of them comes, as that takes 30 ms.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Sized
from dataclasses import dataclass
from numbers import Integral, Number, Real
from pathlib import Path
from typing import Any, TypeVar

LARGEST = 2**63 - 1  # what a tensor's size, or a seed, can be
MOST_JUDGED = 1000  # items that are looked at one by one; of longer rows the first
LONGEST = 60  # characters of a value in a sentence
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    bool: "True or False",
    types.NoneType: "None",
}
# numpy's numbers count as Python's, in a list too.
_STANDS_FOR: dict[Any, Any] = {int: Integral, float: Real}


@dataclass(frozen=True)
class Hint:
    """An annotation.

    `plain`: kinds that fit at once. `judged`: what typeguard holds the rest against; `items`: and
    the items of what can be gone through twice.
    """

    wanted: Any
    plain: tuple[type, ...]
    judged: Any = None
    items: Any = None

    def problem(self, value: Any) -> str | None:
        """Why a value does not fit; None where it does."""
        if isinstance(value, self.plain):
            if type(value) is not bool or bool in self.plain or not {int, Real} & {*self.plain}:
                return self._content_problem(value)
        elif self.judged is not None:
            why = _why_not(value, self.judged) and _why_not(_without_rows(value), self.judged)
            if why is None and self.items is not None and isinstance(value, Collection):
                why = _why_not(list(value), list[self.items])
            if why is None:
                return None
            return f"it must be {_words(self.wanted)} ({why}){_advice(value, self.wanted)}"
        return f"it must be {_words(self.wanted)}{_advice(value, self.wanted)}"

    def _content_problem(self, value: Any) -> str | None:
        """Numbers, texts and names of files that no one can use."""
        if type(value) is int and abs(value) > LARGEST:
            return f"the largest number it can be is {LARGEST:,}"
        if isinstance(value, str | Path):
            try:
                str(value).encode()
            except UnicodeEncodeError:
                return "it holds half of a character, which no file and no screen can show"
            too_long = any(len(name) > 255 for name in str(value).split("/"))
            if "Path" in str(self.wanted) and (not str(value) or too_long or "\0" in str(value)):
                return "no file can be called that"
        return None


def is_row(value: Any) -> bool:
    """An array, tensor or series of one axis, which counts as a list."""
    return getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")


def _without_rows(value: Any) -> Any:
    """A value with lists where rows of numbers are, to judge it by."""
    if isinstance(value, dict):
        return {key: _without_rows(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_rows(part) for part in value)
    return value.tolist() if is_row(value) else value


def _why_not(value: Any, wanted: Any) -> str | None:
    """What typeguard says against a value; None where it fits."""
    from typeguard import CollectionCheckStrategy, ForwardRefPolicy, TypeCheckError, check_type

    if isinstance(value, str | bytes):
        return "a text is no list"
    every, first = CollectionCheckStrategy.ALL_ITEMS, CollectionCheckStrategy.FIRST_ITEM
    is_long = isinstance(value, Sized) and len(value) > MOST_JUDGED
    try:
        check_type(
            value,
            wanted,
            forward_ref_policy=ForwardRefPolicy.IGNORE,
            collection_check_strategy=first if is_long else every,
        )
    except TypeCheckError as error:
        why = str(error).partition("\n")[0].rstrip(":")
        return why.replace("numbers.Integral", "int").replace("numbers.Real", "float")
    return None


@functools.cache
def hint_of(function: Any, name: str) -> Hint | None:
    """What is wanted of an argument; None where everything fits."""
    inner = inspect.unwrap(function)
    parameter = inspect.signature(inner).parameters.get(name)
    if parameter is None or parameter.annotation is parameter.empty:
        return None
    wanted = _meant(parameter.annotation, inner)
    if isinstance(wanted, TypeVar):
        wanted = wanted.__bound__ or Any
    if wanted in (Any, object) or parameter.kind is parameter.VAR_KEYWORD:
        return None
    parts = typing.get_args(wanted) if _is_union(wanted) else (wanted,)
    plain = [part for part in parts if _is_plain(part)]
    kinds: list[Any] = [Real if part is float else part for part in plain]
    others = [_lenient(part) for part in parts if part not in plain]
    judged = functools.reduce(operator.or_, others) if others else None
    items = [typing.get_args(part)[0] for part in parts if typing.get_origin(part) is Iterable]
    return Hint(wanted, tuple(kinds), judged, _lenient(items[0]) if items else None)


def _meant(annotation: Any, function: Any) -> Any:
    """What a written annotation means, also where only type checkers import its names."""
    if not isinstance(annotation, str):
        return annotation
    names = dict(function.__globals__)
    try:
        return eval(annotation, names)  # the project's own text
    except NameError:
        for node in ast.parse(inspect.getsource(sys.modules[function.__module__])).body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                exec(compile(ast.Module(node.body, []), function.__module__, "exec"), names)
        return eval(annotation, names)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_plain(kind: Any) -> bool:
    """A class that `isinstance` takes."""
    try:
        isinstance(None, kind)
    except TypeError:  # a protocol, or an alias with arguments
        return False
    return isinstance(kind, type) and not typing.get_args(kind)


def _lenient(annotation: Any) -> Any:
    """The annotation with numpy's numbers let in where Python's are."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, list):  # the arguments of a Callable
        return [_lenient(part) for part in annotation]
    if not parts or origin in (typing.Literal, typing.Annotated):
        return _STANDS_FOR.get(annotation, annotation)
    inner = tuple(_lenient(part) for part in parts)
    return functools.reduce(operator.or_, inner) if _is_union(annotation) else origin[inner]


def short(value: Any) -> str:
    """A value in an error's sentence, by its kind alone where it is long or none of Python's own."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', '')}()"
    if value is None or isinstance(value, str | bytes | Number | list | tuple | dict | set):
        text = repr(value)
        if len(text) <= LONGEST:
            return text
    article = "an" if type(value).__name__[0] in "aeiouAEIOU" else "a"
    return f"{article} {type(value).__name__}"


def _words(annotation: Any) -> str:
    """An annotation, as a sentence says it."""
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    if all(kind in _WORDS for kind in kinds):
        return " or ".join(_WORDS[kind] for kind in kinds)
    return "of type " + " or ".join(map(_type_name, kinds))


def _type_name(kind: Any) -> str:
    if kind is types.NoneType:
        return "None"
    name = kind.__name__ if _is_plain(kind) else str(kind).replace("~", "")
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", name)


def _advice(value: Any, wanted: Any) -> str:
    """What to write instead, for slips that are often made."""
    kinds = typing.get_args(wanted) if _is_union(wanted) else (wanted,)
    items = value if isinstance(value, list | tuple) else [value]
    texts = [text for text in items if isinstance(text, str)]
    quoted = [text for text in texts if text.replace(".", "", 1).isdecimal()]
    if quoted and re.search(r"\b(int|float)\b", str(wanted)):
        return f", without quotes: {quoted[0]}"
    if isinstance(value, list) and any(typing.get_origin(kind) is tuple for kind in kinds):
        return f"; write a tuple: {short(tuple(value))}"
    if int in kinds and isinstance(value, float) and math.isfinite(value):
        below = math.floor(value)
        return f". Nearest: {f'{below} or {below + 1}' if below >= 1 else max(1, below + 1)}"
    return ""
