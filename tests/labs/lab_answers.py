"""What a lab gives to its checks: its solution, or the stubs that a learner finds.

A right answer stands in one place, the lab. Its script is not run as a whole: of its cells only
those statements run that an answer needs, so that tests get at it without the lab's measurements.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from utils.lessons import SOURCES, folders

sys.path.insert(0, str(SOURCES.parent / "tools"))
from _regions import lab_text, solution_text

HERE = SimpleNamespace(meter_device=torch.device("cpu"))  # what the first cell of a lab makes
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


@functools.cache
def solution(name: str) -> Any:
    """The lab's own answer to an exercise, "01.state_bytes"; of one it does not ask, a KeyError."""
    return _answer(name, solution_text)


def stub(name: str) -> Any:
    """The answer that a learner finds in the lab."""
    return _answer(name, lab_text)


@functools.cache
def exercises_of_labs() -> list[str]:
    """What the labs check: "01.state_bytes"."""
    with_lab = [number for number, folder in folders().items() if (folder / "lab.py").is_file()]
    return [name for number in with_lab for name in _checked(_script(number, solution_text))]


@functools.cache
def functions_of_labs() -> list[str]:
    """Exercises whose answer is one function; nothing is run to know it."""
    return [name for name in exercises_of_labs() if _asks_for_a_function(name)]


def _asks_for_a_function(name: str) -> bool:
    answer, before = _checked(_script(name.partition(".")[0], solution_text))[name]
    written = {node.name for node in before if isinstance(node, ast.FunctionDef)}
    return isinstance(answer.body, ast.Name) and answer.body.id in written


Change = Callable[[list[ast.stmt]], list[ast.stmt]]


def solution_with(name: str, change: Change) -> Any:
    """The lab's own answer, made by changed statements, whose lines are those of `lab.py`."""
    return _answer(name, lab_as_written, change)


def lab_as_written(text: str, _: str) -> str:
    """A lab's script with solution and stubs, which are comments."""
    return text


def _answer(
    name: str, text_of: Callable[[str, str], str], change: Change = lambda statements: statements
) -> Any:
    number = name.partition(".")[0]
    answer, before = _checked(_script(number, text_of))[name]
    scope: dict[str, Any] = {"__name__": "__main__", "setup": lambda _: HERE}
    needed = change(_needed(before, _loaded(_code(answer))))
    exec(_code(needed, _file(number, text_of)), scope)
    return eval(_code(answer), scope)


@functools.cache
def _script(number: str, text_of: Callable[[str, str], str]) -> list[ast.stmt]:
    path = folders()[number] / "lab.py"
    text = text_of(path.read_text(encoding="utf-8"), str(path))
    file = _file(number, text_of)  # with its lines at hand a stub is known as one
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    return ast.parse(text).body


def _file(number: str, text_of: Callable[[str, str], str]) -> str:
    return f"<lab {number}, {text_of.__name__}>"


def _checked(script: list[ast.stmt]) -> dict[str, tuple[ast.Expression, list[ast.stmt]]]:
    """The answer of each `check(...)` by its exercise, and the statements that stand before it."""
    found = {}
    for index, node in enumerate(script):
        match node:
            case ast.Expr(ast.Call(ast.Name("check"), [ast.Constant(str(name)), answer, *_])):
                found[name] = ast.Expression(answer), script[:index]
    return found


def _needed(before: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """Those of the statements that the names hang on, in their order."""
    kept: list[ast.stmt] = []
    for statement in reversed(before):
        code = _code([statement])
        stored = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
        changes = _loaded(code) & names if _changes_values(statement, code) else set[str]()
        if (stored & names or changes) and not isinstance(statement, ast.Try):  # shows an error
            kept.append(statement)
            names = (names if changes else names - stored) | _loaded(code)
    return kept[::-1]


def _changes_values(statement: ast.stmt, code: CodeType) -> bool:
    """Whether it may change what names hold: `x[0] = 1`, or a call that shows nothing."""
    match statement:
        case ast.Expr(ast.Call(ast.Name(called))):
            return called not in ("check", "show", "print")
        case ast.Expr():
            return False
    return any(step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code))


def _code(part: ast.Expression | list[ast.stmt], file: str = "<lab>") -> CodeType:
    if isinstance(part, list):
        return compile(ast.Module(part, []), file, "exec")
    return compile(part, file, "eval")


def _loaded(code: CodeType) -> set[str]:
    """The global names that code asks for, in its functions too."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in _LOADS}
    inner = (_loaded(part) for part in code.co_consts if isinstance(part, CodeType))
    return own.union(*inner)
