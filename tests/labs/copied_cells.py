"""Answers that copy a lesson: each of its functions, expressions and printed numbers, under an exercise's names.

What a lesson's cell needs from others is not computed: of its statements only imports, definitions and
plain values stand. An expression whose other names are as many as the exercise's parameters, or fewer,
is tried with these in each order.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import io
import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

from lab_answers import solution

from utils.labs.checking import find, run_check
from utils.labs.verdict import Status
from utils.lessons import SOURCES, folders

MOST_ORDERS = 24
MOST_NAMES = 4  # of an expression that stand for parameters
TRY_SECONDS = 0.5
MOMENT_SECONDS = 0.02
CALLED_BY_COMPILED = {"__torch_function__", "__torch_dispatch__", "__del__"}
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?(?![\w])")


def copies(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What of its lesson can be handed in for an exercise, each with its text."""
    number = name.partition(".")[0]
    parameters = list(inspect.signature(solution(name)).parameters)
    scope = _scope(number)
    for text, value in scope.items():
        if inspect.isfunction(value) and value.__module__ == "lesson":
            yield f"def {text}", value
    for text in _expressions(number):
        yield from _bound(text, parameters, scope)
    for number_printed in _printed(number):
        yield str(number_printed), _always(number_printed)


def passing(name: str) -> list[str]:
    """The copies that a check takes. A try ends after `TRY_SECONDS`, and kills nobody (lesson 16's do)."""
    check = find(name)
    with mock.patch.object(os, "kill", lambda process, number: _too_long(number, None)):
        return [text for text, answer in copies(name) if _is_taken(check, answer)]


def _is_taken(check: Any, answer: Callable[..., Any]) -> bool:
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, TRY_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return run_check(check, answer).status is Status.CORRECT
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_long(number: int, frame: FrameType | None) -> None:
    """End a try; a moment later if compiled code has called what runs, since it may abort on an exception."""
    while frame is not None:
        if frame.f_code.co_name in CALLED_BY_COMPILED:
            signal.setitimer(signal.ITIMER_REAL, MOMENT_SECONDS)
            return
        frame = frame.f_back
    raise TimeoutError


def _always(value: float) -> Callable[..., float]:
    return lambda *given, **settings: value


@functools.cache
def _scope(number: str) -> dict[str, Any]:
    """A lesson's imports, definitions and plain values; what cannot run is left out."""
    scope: dict[str, Any] = {"__name__": "lesson"}
    for statement in _tree(number).body:
        is_plain = isinstance(statement, ast.Assign) and not any(
            isinstance(node, ast.Call) for node in ast.walk(statement)
        )
        if is_plain or isinstance(
            statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
        ):
            try:
                exec(compile(ast.Module([statement], []), f"<lesson {number}>", "exec"), scope)
            except Exception:  # noqa: BLE001  # it needs what was not computed
                continue
    return scope


@functools.cache
def _tree(number: str) -> ast.Module:
    return ast.parse((folders()[number] / "lesson.py").read_text(encoding="utf-8"))


@functools.cache
def _expressions(number: str) -> list[str]:
    """Those that compute something, each once."""
    kinds = (
        ast.BinOp | ast.Call | ast.Compare | ast.IfExp | ast.Subscript | ast.DictComp | ast.ListComp
    )
    found = (ast.unparse(node) for node in ast.walk(_tree(number)) if isinstance(node, kinds))
    return [text for text in dict.fromkeys(found) if len(text) <= 300]


def _bound(
    text: str, parameters: list[str], scope: dict[str, Any]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The expression as a function of the parameters, which stand for names that the lesson computes."""
    code = compile(text, "<copied>", "eval")
    known = {*scope, *dir(builtins)}
    open_names = [name for name in code.co_names if name not in known]
    loaded = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    free = [name for name in dict.fromkeys(open_names) if name in loaded]
    if not 0 < len(free) <= min(len(parameters), MOST_NAMES):
        return
    for places in itertools.islice(
        itertools.permutations(range(len(parameters)), len(free)), MOST_ORDERS
    ):
        order = ", ".join(f"{name}={parameters[at]}" for name, at in zip(free, places, strict=True))
        yield f"{text} with {order}", _call(code, free, places, parameters, scope)


def _call(
    code: Any,
    free: list[str],
    places: tuple[int, ...],
    parameters: list[str],
    scope: dict[str, Any],
) -> Callable[..., Any]:
    def copied(*given: Any, **settings: Any) -> Any:
        values = [
            *given,
            *(settings[name] for name in parameters[len(given) :] if name in settings),
        ]
        names = dict(zip(free, (values[at] for at in places), strict=True))
        return eval(code, {**scope, **names})

    return copied


@functools.cache
def _printed(number: str) -> list[float]:
    """Numbers in the lesson's stored output."""
    folder = folders()[number].relative_to(SOURCES)
    path = (SOURCES.parent / "notebooks" / folder).with_suffix(".ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    texts = [
        "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
        for output in outputs
    ]
    found = (text.replace(",", "") for all_ in texts for text in _NUMBER.findall(all_))
    return list(
        dict.fromkeys(int(text) if text.lstrip("-").isdigit() else float(text) for text in found)
    )
