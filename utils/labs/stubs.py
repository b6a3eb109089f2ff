"""Tells an answer that was not begun: `...` as it came in the lab."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any, TypeGuard

MOST_NESTED = 4  # of lists in an answer: one may hold itself


def _blank() -> None: ...


def _blank_with_docstring() -> None:
    """Compiles like a stub that has a docstring."""
    ...


_BLANK_CODE = {_blank.__code__.co_code, _blank_with_docstring.__code__.co_code}


def untouched(answer: Any, depth: int = MOST_NESTED) -> str:
    """Why an answer counts as not attempted; "" where it was attempted. Never raises."""
    if answer is ...:
        return "your answer is still `...`"
    if isinstance(answer, dict) and (blank := [str(key) for key in answer if answer[key] is ...]):
        return f"still `...`: {', '.join(blank)}"
    if isinstance(answer, (tuple, list, dict)):
        parts = parts_of(answer) if depth else ()
        return next(filter(None, (untouched(part, depth - 1) for part in parts)), "")
    return next(filter(None, map(_stub_in, functions_of(answer))), "")


def parts_of(answer: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> Iterable[Any]:
    """What an answer holds."""
    return answer.values() if isinstance(answer, dict) else answer


def functions_of(answer: Any) -> Iterable[FunctionType]:
    """The functions that an answer is made of: itself, or its class's own methods."""
    if isinstance(answer, functools.partial):
        answer = answer.func
    if isinstance(answer, MethodType):
        answer = answer.__func__
    if isinstance(answer, FunctionType):
        return [inspect.unwrap(answer)]
    owner = answer if isinstance(answer, type) else type(answer)
    # Classes of a notebook or script only: others hold `...` for reasons of their own.
    is_learners = owner.__module__ == "__main__"
    return [f for f in vars(owner).values() if isinstance(f, FunctionType)] if is_learners else []


def _stub_in(function: FunctionType) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        lines = [node.lineno for node in ast.walk(ast.parse(source)) if _is_stub(node)]
    except (OSError, TypeError, SyntaxError):  # no source to be had, or only a part of it
        lines = [1] if _is_blank(function) else []
    return f"line {lines[0]} of `{function.__name__}` is still `...`" if lines else ""


def _is_blank(function: FunctionType) -> bool:
    code = function.__code__  # that of `lambda: 42` differs in its constant alone
    nothing = (None, ..., function.__doc__)
    return code.co_code in _BLANK_CODE and all(value in nothing for value in code.co_consts)


def _is_stub(node: ast.AST) -> TypeGuard[ast.stmt | ast.expr]:
    # A statement `...`, or `x = ...`; an index such as x[..., 0] is no stub.
    holds_value = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Return)
    value = node.value if isinstance(node, holds_value) else getattr(node, "body", None)
    return isinstance(value, ast.Constant) and value.value is ...
